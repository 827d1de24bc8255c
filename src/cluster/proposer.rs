//! Proposing to a group wherever it is led: here, or on another node.
//!
//! Used for what is rare (schema changes, scrubs, meta commands). Pushes are never forwarded: clients find the leader.
//!
//! Invariant: only commands that may be applied twice without harm are proposed here, because a try whose outcome is
//! unknown is tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::{ErrorKind, MetaCommand, MetaOutcome, ProposeRequest, meta_command::Command};
use prost::Message;

use super::node::Node;
use crate::meta::state::{META_GROUP, find_group};
use crate::model::CommandOutcome;
use crate::service::RequestError;

const PAUSE: Duration = Duration::from_millis(25);
/// For the answer of a group that this node leads.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

impl Node {
    /// Proposes to `group` through its leader, trying again until `deadline`.
    ///
    /// # Errors
    /// UNAVAILABLE when no leader took it in time, naming the last reason.
    pub async fn propose(
        &self,
        group: u64,
        command: Bytes,
        deadline: Instant,
    ) -> Result<Bytes, RequestError> {
        let mut hint: Option<String> = None;
        let mut next = 0;
        loop {
            let last = match self.propose_once(group, &command, hint.take(), &mut next).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if !matches!(
                last.kind(),
                ErrorKind::NotLeader
                    | ErrorKind::Unavailable
                    | ErrorKind::UnknownGroup
                    | ErrorKind::Exhausted
            ) {
                return Err(last);
            }
            if Instant::now() + PAUSE >= deadline {
                let what = format!("group {group} took no command in time; last: {last}");
                return Err(RequestError::new(ErrorKind::Unavailable, what).in_group(group).retry_soon());
            }
            hint = Some(last.0.leader_address).filter(|address| !address.is_empty());
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn propose_once(
        &self,
        group: u64,
        command: &Bytes,
        hint: Option<String>,
        next: &mut usize,
    ) -> Result<Bytes, RequestError> {
        let local = self.replicas.raft(group);
        if let Some(raft) = &local
            && raft.leadership().is_self
        {
            return self.propose_here(group, command.clone()).await;
        }
        let known =
            hint.or_else(|| local.and_then(|raft| raft.leadership().leader).map(|(_, peer)| peer.address));
        let address = known.or_else(|| {
            // Nobody known: the replicas in turn.
            let others = self.addresses_of_group(group);
            *next += 1;
            others.get((*next - 1) % others.len().max(1)).cloned()
        });
        let Some(address) = address else {
            return Err(RequestError::not_leader(group, None));
        };
        if address == self.config.advertise {
            return self.propose_here(group, command.clone()).await;
        }
        let request = ProposeRequest { cluster_id: self.cluster_id(), group, command: command.clone() };
        let mut client = self.peers.node(&address)?;
        match client.propose(request).await {
            Ok(reply) => Ok(reply.into_inner().answer),
            Err(status) => Err(RequestError::from_status(&status)),
        }
    }

    /// Proposes to a group that this node leads.
    ///
    /// # Errors
    /// NOT_LEADER with a hint, or what the group said.
    pub async fn propose_here(&self, group: u64, command: Bytes) -> Result<Bytes, RequestError> {
        let raft = self.replicas.raft(group).ok_or_else(|| {
            let what = format!("group {group} is not on node {}", self.config.node_id);
            RequestError::new(ErrorKind::UnknownGroup, what).in_group(group).retry_soon()
        })?;
        let refused = |e| RequestError::from_propose(group, &e);
        // A command taken in just before the quorum was lost waits for it without end; it may come to pass after all.
        match tokio::time::timeout(ANSWER_WITHIN, raft.propose(command).map_err(refused)?).await {
            Ok(answer) => answer.map_err(refused),
            Err(_) => {
                let what = format!("group {group} did not commit it within {ANSWER_WITHIN:?}");
                Err(RequestError::new(ErrorKind::Unavailable, what).in_group(group).retry_soon())
            }
        }
    }

    pub(super) fn addresses_of_group(&self, group: u64) -> Vec<String> {
        let state = self.meta_state();
        let Some(placement) = find_group(&state, group) else { return self.config.peers.clone() };
        let on = placement.replicas.iter().map(|r| r.node);
        on.filter_map(|node| state.nodes.iter().find(|n| n.id == node)).map(|n| n.address.clone()).collect()
    }

    /// Proposes a command other than a push to a shard, and reads what became of it.
    ///
    /// # Errors
    /// CONFLICT, INVALID or INTERNAL when the shard refused it, UNAVAILABLE when it took none in time.
    pub(super) async fn propose_to_shard(
        &self,
        group: u64,
        command: &ShardCommand,
        deadline: Instant,
    ) -> Result<(), RequestError> {
        let answer = self.propose(group, command.encode(), deadline).await?;
        let refused = |kind, what: String| Err(RequestError::new(kind, what).in_group(group));
        match CommandOutcome::decode(&answer) {
            Ok(CommandOutcome::Done) => Ok(()),
            Ok(CommandOutcome::Conflict { table }) => refused(
                ErrorKind::Conflict,
                format!("group {group} has table {table} with another definition"),
            ),
            Ok(CommandOutcome::Dropped { table }) => {
                refused(ErrorKind::UnknownTable, format!("table {table} was dropped in group {group}"))
            }
            Ok(CommandOutcome::Invalid { table }) => refused(
                ErrorKind::Invalid,
                format!("group {group} takes no such definition for table {table}"),
            ),
            Ok(CommandOutcome::Malformed | CommandOutcome::OutOfOrder) => {
                refused(ErrorKind::Internal, format!("group {group} could not read a command of this node"))
            }
            Ok(CommandOutcome::CutTooOld) => refused(
                ErrorKind::Conflict,
                format!(
                    "what the checkpoint builds upon was cut too long ago in group {group}: a base is needed"
                ),
            ),
            Err(error) => refused(ErrorKind::Internal, format!("the answer of group {group}: {error}")),
        }
    }

    /// Proposes a meta command and gives its outcome.
    ///
    /// # Errors
    /// CONFLICT or INVALID when it was refused, UNAVAILABLE when the meta group took none in time.
    pub async fn propose_meta(
        self: &Arc<Self>,
        command: Command,
        deadline: Instant,
    ) -> Result<MetaOutcome, RequestError> {
        let bytes = MetaCommand { command: Some(command) }.encode_to_vec();
        let answer = self.propose(META_GROUP, bytes.into(), deadline).await?;
        let outcome = MetaOutcome::decode(answer)
            .map_err(|e| RequestError::new(ErrorKind::Internal, format!("the meta group's answer: {e}")))?;
        if outcome.error.is_empty() {
            return Ok(outcome);
        }
        let named = i32::try_from(outcome.kind).ok().and_then(|kind| ErrorKind::try_from(kind).ok());
        let kind = match named {
            _ if outcome.conflict => ErrorKind::Conflict,
            None | Some(ErrorKind::Unspecified) => ErrorKind::Invalid,
            Some(kind) => kind,
        };
        Err(RequestError::new(kind, outcome.error))
    }
}
