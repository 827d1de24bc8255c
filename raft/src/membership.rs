//! Changing who is in a group: learners, voters, addresses, and the replacement of a lost replica.
//!
//! A replacement walks: add the new replica as a learner → wait until it has nearly everything → make it a voter and
//! drop the old one, in one change. The group stays available throughout, and a step that fails can be asked for again.
//!
//! Invariants:
//! - a replica becomes a voter only after it has caught up;
//! - every call is idempotent: asking for what is there already succeeds.
//!
//! Not here: deciding who to replace (`src`'s reconciler), making the replica on the other node (its server).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{ClientWriteError, Fatal, InitializeError, RaftError};
use openraft::{ChangeMembers, Instant as _};

use crate::error::GroupError;
use crate::group::{Group, leader_of};
use crate::membership_codec::Members;
use crate::type_config::{Peer, Runtime, TypeConfig};

/// Entries that a learner may lack when it is made a voter.
const CAUGHT_UP_LAG: u64 = 64;

impl<RT: Runtime> Group<RT> {
    /// Makes the group: on one replica of a new group, once. All of `members` are voters; this replica is one of them.
    /// Durable here when it returns.
    ///
    /// # Errors
    /// [`GroupError::Initialize`] when the group has a log already, or this replica is not among the members.
    pub async fn initialize(&self, members: BTreeMap<u64, Peer>) -> Result<(), GroupError> {
        let group = self.group();
        match self.inner.raft.initialize(members).await {
            // openraft answers once the entry is applied, which may be before it is synced.
            Ok(()) => match self.inner.log.durable_changes().wait_for(Option::is_some).await {
                Ok(_) => Ok(()),
                Err(_) => Err(self.gone()),
            },
            Err(RaftError::APIError(error)) => {
                let reason = match &error {
                    InitializeError::NotAllowed(_) => "it has a log already".to_owned(),
                    InitializeError::NotInMembers(_) => "this replica is not among the members".to_owned(),
                };
                Err(GroupError::Initialize { group, reason })
            }
            Err(RaftError::Fatal(fatal)) => Err(self.fatal(&fatal)),
        }
    }

    /// Whether the group was ever made, as far as this replica knows: it has a log or has voted.
    #[must_use]
    pub fn is_initialized(&self) -> bool {
        self.inner.log.state().last.is_some() || self.inner.log.vote().is_some()
    }

    /// Who is in the group, as this replica knows it.
    #[must_use]
    pub fn members(&self) -> Members {
        let metrics = self.inner.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        Members::of(metrics.membership_config.membership())
    }

    /// Adds a learner; it receives the log (or a snapshot) from now on. Returns when the change is committed.
    ///
    /// # Errors
    /// [`GroupError::NotLeader`], [`GroupError::Membership`] when another change is under way.
    pub async fn add_learner(&self, replica: u64, peer: Peer) -> Result<(), GroupError> {
        if self.members().peer(replica) == Some(&peer) {
            return Ok(());
        }
        self.change(ChangeMembers::AddNodes(BTreeMap::from([(replica, peer)]))).await
    }

    /// Corrects where a member is reached.
    ///
    /// # Errors
    /// As [`Group::add_learner`].
    pub async fn set_address(&self, replica: u64, peer: Peer) -> Result<(), GroupError> {
        match self.members().peer(replica) {
            None => Err(GroupError::Membership { reason: format!("replica {replica} is not a member") }),
            Some(known) if *known == peer => Ok(()),
            Some(_) => self.change(ChangeMembers::SetNodes(BTreeMap::from([(replica, peer)]))).await,
        }
    }

    /// Makes exactly these replicas the voters; they are members already. Former voters leave the group.
    ///
    /// # Errors
    /// As [`Group::add_learner`].
    pub async fn change_membership(&self, voters: BTreeSet<u64>) -> Result<(), GroupError> {
        let members = self.members();
        if !members.joint && members.voters.keys().copied().eq(voters.iter().copied()) {
            return Ok(());
        }
        self.change(ChangeMembers::ReplaceAllVoters(voters)).await
    }

    /// Takes a learner out of the group.
    ///
    /// # Errors
    /// As [`Group::add_learner`].
    pub async fn remove_learner(&self, replica: u64) -> Result<(), GroupError> {
        let members = self.members();
        if members.voters.contains_key(&replica) {
            return Err(GroupError::Membership { reason: format!("replica {replica} votes") });
        }
        if !members.learners.contains_key(&replica) {
            return Ok(());
        }
        self.change(ChangeMembers::RemoveNodes(BTreeSet::from([replica]))).await
    }

    /// How many entries a member lacks, as its leader knows; `None` when it does not.
    #[must_use]
    pub fn lag(&self, replica: u64) -> Option<u64> {
        let metrics = self.inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        let matched = (*metrics.replication.as_ref()?.get(&replica)?)?;
        Some(metrics.last_log_index.unwrap_or(0).saturating_sub(matched.index()))
    }

    /// Waits until a member lacks at most a few entries.
    ///
    /// # Errors
    /// [`GroupError::NotLeader`] when leadership is lost meanwhile, [`GroupError::Timeout`].
    pub async fn wait_caught_up(&self, replica: u64, within: Duration) -> Result<(), GroupError> {
        let deadline = RT::Instant::now() + within;
        loop {
            if self.inner.leader.term_led_now().is_none() {
                return Err(GroupError::NotLeader { leader: self.leadership().leader });
            }
            if self.lag(replica).is_some_and(|lag| lag <= CAUGHT_UP_LAG) {
                return Ok(());
            }
            if RT::Instant::now() >= deadline {
                return Err(GroupError::Timeout { what: "the replica to catch up", after: within });
            }
            RT::sleep(self.inner.options.timing.heartbeat).await;
        }
    }

    /// Replaces voter `old` (or adds a voter, when `None`) by `new`, which the other node holds already; see the module.
    ///
    /// # Errors
    /// Those of the steps. Asking again goes on where it stopped.
    pub async fn replace(
        &self,
        old: Option<u64>,
        new: u64,
        peer: Peer,
        within: Duration,
    ) -> Result<(), GroupError> {
        let members = self.members();
        if !members.voters.contains_key(&new) {
            self.add_learner(new, peer).await?;
            self.wait_caught_up(new, within).await?;
        }
        let mut voters: BTreeSet<u64> = self.members().voters.keys().copied().collect();
        voters.insert(new);
        if let Some(old) = old {
            voters.remove(&old);
        }
        self.change_membership(voters).await
    }

    async fn change(&self, change: ChangeMembers<u64, Peer>) -> Result<(), GroupError> {
        match self.inner.raft.change_membership(change, false).await {
            Ok(_) => Ok(()),
            Err(RaftError::APIError(error)) => Err(change_error(error)),
            Err(RaftError::Fatal(fatal)) => Err(self.fatal(&fatal)),
        }
    }

    fn fatal(&self, fatal: &Fatal<TypeConfig<RT>>) -> GroupError {
        tracing::debug!(group = self.group(), replica = self.replica(), %fatal, "asked of a stopped group");
        self.gone()
    }
}

fn change_error<RT: Runtime>(error: ClientWriteError<TypeConfig<RT>>) -> GroupError {
    match error {
        ClientWriteError::ForwardToLeader(forward) | ClientWriteError::LogEntryDiscarded(forward) => {
            GroupError::NotLeader { leader: leader_of(&forward) }
        }
        ClientWriteError::ChangeMembershipError(error) => {
            GroupError::Membership { reason: error.to_string() }
        }
        ClientWriteError::PreconditionFailed(error) => GroupError::Membership { reason: error.to_string() },
    }
}
