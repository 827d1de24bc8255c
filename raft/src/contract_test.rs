//! openraft's own contract suite, over our log store and applier, on real files.

use std::sync::Arc;

use evershard_storage::disk::RealDisk;
use evershard_storage::log::{Driver, Log, LogOptions};
use openraft::StorageError;
use openraft::entry::RaftEntry as _;
use openraft::storage::{RaftLogStorage, RaftLogStorageExt};
use openraft::testing::log::{StoreBuilder, Suite};

use crate::applier::{Applier, ApplierState};
use crate::executor::ApplyThreads;
use crate::log_store::LogStore;
use crate::options::RaftLimits;
use crate::snapshot::builder::LinkSource;
use crate::type_config::{LeaderId, LogId, RaftEntry, Tokio, TypeConfig};

#[path = "../tests/support/adder.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod adder;

struct Builder;

struct Guard {
    log: Log,
    _folder: tempfile::TempDir,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.log.close().expect("closes");
    }
}

impl StoreBuilder<TypeConfig<Tokio>, LogStore<Tokio>, Applier<Tokio>, Guard> for Builder {
    async fn build(
        &self,
    ) -> Result<(Guard, LogStore<Tokio>, Applier<Tokio>), StorageError<TypeConfig<Tokio>>> {
        let folder = tempfile::tempdir().expect("tempdir");
        let options = LogOptions::new(folder.path().join("log"));
        let (log, _) = Log::open(options, Arc::new(RealDisk), Driver::Threaded).expect("log");
        let limits = RaftLimits::default();
        let executor = ApplyThreads::start(1).expect("threads");
        let machine = adder::Adder::open(&folder.path().join("state"), true, None);
        let group = log.group(1, 1).expect("group");
        let store = LogStore::new(group, Arc::clone(&executor) as _, Arc::clone(&machine) as _, &limits);
        let links = LinkSource {
            state_machine: Arc::clone(&machine) as _,
            executor: Arc::clone(&executor) as _,
            lane: 1,
            outgoing: folder.path().join("outgoing"),
            log: log.group(1, 1).expect("group"),
            hold_bytes: limits.snapshot_hold_log_bytes,
            shelf: Arc::default(),
        };
        let applier = Applier::open(machine, executor, 1, links, limits, Arc::new(ApplierState::default()))
            .await
            .expect("opens");
        Ok((Guard { log, _folder: folder }, store, applier))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_openrafts_suite() {
    Suite::test_all(Builder).await.expect("the whole suite");
}

fn id(term: u64, index: u64) -> LogId {
    LogId::new(LeaderId { term, node_id: term }, index)
}

/// The record of the committed position goes out with whatever is written next, so a torn batch may keep it and lose the
/// entries it speaks of, or the truncation before them. openraft would apply what lies at these indexes, or find too
/// little and not start at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_committed_position_counts_only_with_the_entry_it_names() {
    let (guard, mut store, _applier) = Builder.build().await.expect("builds");
    store.blocking_append((1..=5).map(|index| RaftEntry::new_blank(id(1, index)))).await.expect("appended");
    for (committed, counts) in
        [(id(1, 3), true), (id(1, 5), true), (id(1, 6), false), (id(2, 5), false), (id(2, 3), false)]
    {
        store.save_committed(Some(committed)).await.expect("saved");
        let read = store.read_committed().await.expect("readable");
        assert_eq!(read, counts.then_some(committed), "{committed}");
    }
    store.purge(id(1, 4)).await.expect("purged");
    for (committed, counts) in [(id(1, 4), true), (id(2, 4), false), (id(1, 2), false)] {
        store.save_committed(Some(committed)).await.expect("saved");
        let read = store.read_committed().await.expect("readable");
        assert_eq!(read, counts.then_some(committed), "{committed} of a purged log");
    }
    drop(guard);
}
