//! Sessions: the meta group numbers them, its leader holds their leases, and the shards are told when they end.
//!
//! Invariants:
//! - a lease is volatile: a new meta leader gives every session a fresh one, so a session ends late, never early;
//! - what is remembered of leases is bounded by the sessions there are: those that ended are forgotten at the next look;
//! - a session that ended is told to the shards as (floor, live): it can never read as a new one (design 14.5).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::{
    ErrorKind, ExpireSessions, OpenMetaSession, WorkerIdentity, meta_command::Command,
};
use parking_lot::Mutex;

use super::node::Node;
use crate::meta::state::META_SHARD;
use crate::service::RequestError;

/// When each session was last heard of, on the meta leader.
#[derive(Debug, Default)]
pub struct Leases {
    heard: Mutex<(u64, HashMap<u64, Instant>)>,
}

impl Leases {
    /// Hears of `session` in the meta leader's term `term`.
    fn renew(&self, term: u64, session: u64) {
        let mut heard = self.heard.lock();
        if heard.0 != term {
            *heard = (term, HashMap::new());
        }
        heard.1.insert(session, Instant::now());
    }

    /// Those of `sessions`, which are all there are, not heard of for `lease`; one seen for the first time in this term is
    /// heard of now.
    fn expired(&self, term: u64, sessions: impl Iterator<Item = u64>, lease: Duration) -> Vec<u64> {
        let now = Instant::now();
        let sessions: HashSet<u64> = sessions.collect();
        let mut heard = self.heard.lock();
        if heard.0 != term {
            *heard = (term, HashMap::new());
        }
        // One that was opened since the caller looked may go with them: it is heard of anew at the next look.
        heard.1.retain(|session, _| sessions.contains(session));
        let mut expired: Vec<u64> = sessions
            .into_iter()
            .filter(|s| now.duration_since(*heard.1.entry(*s).or_insert(now)) > lease)
            .collect();
        expired.sort_unstable();
        expired
    }
}

impl Node {
    /// Issues a session number, for a worker if one is given; the same nonce gives the same number.
    ///
    /// # Errors
    /// FENCED when the worker does not have its rank; UNAVAILABLE when the meta group took no command in time.
    pub async fn open_session(
        self: &Arc<Self>,
        nonce: bytes::Bytes,
        worker: Option<WorkerIdentity>,
    ) -> Result<u64, RequestError> {
        self.require_cluster()?;
        if nonce.len() != 16 {
            let what = format!("a session's nonce has 16 bytes, not {}", nonce.len());
            return Err(RequestError::new(ErrorKind::Invalid, what));
        }
        let open = Command::OpenSession(OpenMetaSession { nonce, worker });
        let outcome = self.propose_meta(open, Instant::now() + Duration::from_secs(10)).await?;
        Ok(outcome.session)
    }

    /// Renews a session's lease, on the meta leader.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere; SESSION_EXPIRED when it ended.
    pub fn renew_session_here(&self, session: u64) -> Result<(), RequestError> {
        let meta = self.replicas.meta();
        let leadership = meta.as_ref().map(|m| m.raft.leadership()).unwrap_or_default();
        // One that was cut off would take a renewal that the next leader never hears of.
        let serves = meta.as_ref().is_some_and(|m| m.raft.serving_lease().is_ok());
        if !leadership.is_self || !serves {
            let leader = leadership.leader.filter(|_| !leadership.is_self);
            return Err(RequestError::not_leader(0, leader.as_ref()));
        }
        if !self.meta_state().sessions.iter().any(|s| s.session == session && !s.ending) {
            let what =
                format!("session {session} has ended: the outcome of its unacknowledged pushes is unknown");
            return Err(RequestError::new(ErrorKind::SessionExpired, what));
        }
        self.leases.renew(leadership.term, session);
        Ok(())
    }

    /// Ends what was not heard of for the lease. Done by the meta leader's agent.
    pub(super) async fn expire_sessions(self: &Arc<Self>, term: u64) {
        let state = self.meta_state();
        let lease = Duration::from_secs(u64::from(self.config.session_lease_seconds));
        let expired = self.leases.expired(term, state.sessions.iter().map(|s| s.session), lease);
        if !expired.is_empty() {
            // A leader that was frozen or cut off has heard of nobody, and another may have: only who leads now ends sessions.
            let Some(meta) = self.replicas.meta() else { return };
            if meta.raft.read_index().await.is_err() || meta.raft.leadership().term != term {
                return;
            }
            tracing::info!(?expired, "sessions end: their clients were not heard of");
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        if let Err(error) = self.end_sessions(expired, deadline).await {
            tracing::warn!(%error, "sessions that ended are still listed; tried again");
        }
    }

    /// Ends `expired`, and every session that the meta group says is ending: no shard takes a push of one when this has
    /// returned.
    ///
    /// # Errors
    /// UNAVAILABLE, naming the group: some shards know, and all are told again when this is called again.
    pub(super) async fn end_sessions(
        self: &Arc<Self>,
        mut expired: Vec<u64>,
        deadline: Instant,
    ) -> Result<(), RequestError> {
        let _one_at_a_time = self.ending_sessions.lock().await;
        let state = self.meta_state();
        expired.extend(state.sessions.iter().filter(|s| s.ending).map(|s| s.session));
        if expired.is_empty() {
            return Ok(());
        }
        let live = state.sessions.iter().map(|s| s.session).filter(|s| !expired.contains(s)).collect();
        // The shards first: a session is forgotten by the meta group only when no shard can take its pushes.
        let entry = ShardCommand::Sessions { floor: state.next_session, live };
        let shards = state.groups.iter().filter(|g| g.shard != META_SHARD);
        let told = shards.map(|shard| self.propose_to_shard(shard.group, &entry, deadline));
        futures_util::future::try_join_all(told).await?;
        let expire = Command::ExpireSessions(ExpireSessions { sessions: expired });
        self.propose_meta(expire, deadline).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(60);

    #[test]
    fn what_ended_is_not_remembered() {
        let leases = Leases::default();
        for session in 0..1000 {
            leases.renew(3, session);
        }
        assert!(leases.expired(3, 990..1000, LEASE).is_empty());
        assert_eq!(leases.heard.lock().1.len(), 10);
        assert!(leases.expired(3, std::iter::empty(), LEASE).is_empty());
        assert!(leases.heard.lock().1.is_empty());
    }

    #[test]
    fn a_session_ends_when_it_was_not_heard_of_in_this_term() {
        let leases = Leases::default();
        leases.renew(3, 7);
        assert!(leases.expired(3, [7, 8].into_iter(), LEASE).is_empty(), "8 is heard of now");
        std::thread::sleep(Duration::from_millis(2));
        leases.renew(3, 8);
        assert_eq!(leases.expired(3, [7, 8].into_iter(), Duration::from_millis(1)).first(), Some(&7));
        assert!(leases.expired(4, [7, 8].into_iter(), Duration::ZERO).is_empty(), "a new term knows nobody");
    }
}
