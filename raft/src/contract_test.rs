//! openraft's own contract suite, over our log store and applier, on real files.

use std::sync::Arc;

use evershard_storage::disk::RealDisk;
use evershard_storage::log::{Driver, Log, LogOptions};
use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};

use crate::applier::{Applier, ApplierState};
use crate::executor::ApplyThreads;
use crate::log_store::LogStore;
use crate::options::RaftLimits;
use crate::type_config::{Tokio, TypeConfig};

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
        let store = LogStore::new(log.group(1, 1).expect("group"), Arc::clone(&executor) as _, &limits);
        let machine = adder::Adder::open(&folder.path().join("state"), true, None);
        let applier = Applier::open(
            machine,
            executor,
            1,
            folder.path().join("outgoing"),
            limits,
            Arc::new(ApplierState::default()),
        )
        .await
        .expect("opens");
        Ok((Guard { log, _folder: folder }, store, applier))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_openrafts_suite() {
    Suite::test_all(Builder).await.expect("the whole suite");
}
