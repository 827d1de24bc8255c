//! Who may answer a read: what each consistency asks of a replica, before its rows are read and after.
//!
//! | consistency | before | after |
//! |---|---|---|
//! | leader | the lease | |
//! | linearizable | a quorum confirms, then the replica applies as far | |
//! | bounded | the replica can show that it is fresh enough, or waits for that a moment | it still can: by the clock after its rows were read |
//! | any | | |
//!
//! Whoever asks for an index besides (its own last push, or where a scan is) waits for it a moment.
//!
//! A pause of the process anywhere in between, however long, is found by the check that comes after. One behind that cannot
//! hurt: what was acknowledged `max_staleness_ms` before the *call* is in the rows, whenever they arrive.
//!
//! Not here: how freshness is known (`crate::cluster::freshness`).

use std::time::{Duration, Instant};

use evershard_proto::v1::{Consistency, ErrorKind, PullRequest};

use super::RequestError;
use super::parameter::ParameterDoor;
use crate::cluster::replicas::ShardReplica;

/// A replica that is not fresh enough has this long to become it; then the client asks another one.
const FRESH_WITHIN: Duration = Duration::from_millis(200);
/// For a leader to apply what a quorum confirmed.
const APPLIED_WITHIN: Duration = Duration::from_secs(2);

/// What is asked of the replica that reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadTerms {
    consistency: Consistency,
    bound: Duration,
    min_index: u64,
}

impl ReadTerms {
    /// Of a pull.
    pub(super) fn of(request: &PullRequest) -> Result<Self, RequestError> {
        Self::new(request.group, request.consistency, request.max_staleness_ms, request.min_index)
    }

    /// As they came.
    ///
    /// # Errors
    /// INVALID: a consistency of another version, or a bound of nothing.
    pub(super) fn new(
        group: u64,
        consistency: i32,
        max_staleness_ms: u32,
        min_index: u64,
    ) -> Result<Self, RequestError> {
        let invalid = |what: String| RequestError::new(ErrorKind::Invalid, what).in_group(group);
        let consistency = Consistency::try_from(consistency)
            .map_err(|_| invalid(format!("this build knows no consistency {consistency}")))?;
        if consistency == Consistency::Bounded && max_staleness_ms == 0 {
            return Err(invalid(
                "a bounded read needs max_staleness_ms above 0: no replica is as fresh as now".into(),
            ));
        }
        let bound = Duration::from_millis(max_staleness_ms.into());
        Ok(ReadTerms { consistency, bound, min_index })
    }
}

fn too_stale(group: u64, what: String) -> RequestError {
    RequestError::new(ErrorKind::TooStale, format!("group {group}: {what}")).in_group(group)
}

impl ParameterDoor {
    /// Waits until the replica may read, for a moment at the most.
    pub(super) async fn before_read(
        &self,
        replica: &ShardReplica,
        terms: &ReadTerms,
    ) -> Result<(), RequestError> {
        let group = replica.listed.group;
        let refused = |error| RequestError::from_not_serving(group, &error);
        let until = Instant::now() + FRESH_WITHIN;
        match terms.consistency {
            Consistency::Leader => {
                replica.raft.serving_lease().map_err(refused)?;
                wait_index(replica, terms.min_index, until).await
            }
            Consistency::Linearizable => {
                let index = replica.raft.read_point().await.map_err(refused)?;
                if replica.reader.applied() >= index || replica.raft.wait_applied(index, APPLIED_WITHIN).await
                {
                    return wait_index(replica, terms.min_index, until).await;
                }
                let what =
                    format!("group {group}: the leader has not applied {index} within {APPLIED_WITHIN:?}");
                Err(RequestError::new(ErrorKind::Unavailable, what).in_group(group).retry_soon())
            }
            Consistency::Bounded => self.wait_fresh(replica, terms).await,
            Consistency::Any => wait_index(replica, terms.min_index, until).await,
        }
    }

    async fn wait_fresh(&self, replica: &ShardReplica, terms: &ReadTerms) -> Result<(), RequestError> {
        let group = replica.listed.group;
        let until = Instant::now() + FRESH_WITHIN;
        self.freshness.want(group, terms.bound);
        let mut heard = self.freshness.watch();
        wait_index(replica, terms.min_index, until).await?;
        loop {
            heard.mark_unchanged();
            let Err(error) = self.check_fresh(replica, terms, replica.reader.applied()) else {
                return Ok(());
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(error);
            }
            match self.freshness.index_for(group, terms.bound) {
                Some(index) if index > replica.reader.applied() => {
                    replica.raft.wait_applied(index, left).await;
                }
                _ => {
                    self.freshness.hurry(group);
                    // Whichever: the check decides.
                    let _ = tokio::time::timeout(left, heard.changed()).await;
                }
            }
        }
    }

    /// Whether rows that reflect `index` may be answered, now that they were read.
    pub(super) fn after_read(
        &self,
        replica: &ShardReplica,
        terms: &ReadTerms,
        index: u64,
    ) -> Result<(), RequestError> {
        check_index(replica, terms.min_index, index)?;
        match terms.consistency {
            Consistency::Leader | Consistency::Linearizable | Consistency::Any => Ok(()),
            Consistency::Bounded => self.check_fresh(replica, terms, index),
        }
    }

    fn check_fresh(&self, replica: &ShardReplica, terms: &ReadTerms, index: u64) -> Result<(), RequestError> {
        // A leader within its lease has all there is.
        if replica.raft.serving_lease().is_ok() {
            return Ok(());
        }
        let (group, bound) = (replica.listed.group, terms.bound);
        match self.freshness.age(group, index) {
            Some(age) if age <= bound => Ok(()),
            Some(age) => Err(too_stale(
                group,
                format!("this replica may lack what is {age:.1?} old, {bound:?} was asked"),
            )),
            None => Err(too_stale(group, "this replica has not heard lately how far its group is".into())),
        }
    }
}

fn check_index(replica: &ShardReplica, min_index: u64, index: u64) -> Result<(), RequestError> {
    if index >= min_index {
        return Ok(());
    }
    let what = format!("this replica has applied {index}, the reader knows of {min_index}");
    Err(too_stale(replica.listed.group, what))
}

async fn wait_index(replica: &ShardReplica, min_index: u64, until: Instant) -> Result<(), RequestError> {
    if replica.reader.applied() < min_index {
        replica.raft.wait_applied(min_index, until.saturating_duration_since(Instant::now())).await;
    }
    check_index(replica, min_index, replica.reader.applied())
}
