//! Real clusters of real processes, for tests: started, killed, frozen, cut off and looked at.
//!
//! Every test owns its cluster: own ports, own directory, gone with the test (kept, and named, when the test fails).
//! Waits are by condition with a generous limit; no test asserts how long something took.

#![allow(dead_code, unused_imports)] // Each test binary compiles this module and uses a part of it.

pub(crate) mod cluster;
pub(crate) mod falsify;
pub(crate) mod flushed;
pub(crate) mod frozen_disk;
pub(crate) mod laggard;
pub(crate) mod ledger;
pub(crate) mod metrics;
pub(crate) mod node;
pub(crate) mod ports;
pub(crate) mod power;
pub(crate) mod proxy;
pub(crate) mod pusher;
pub(crate) mod raw;
pub(crate) mod small_disk;
pub(crate) mod trainer;

pub(crate) use cluster::{Cluster, Options};

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Nothing that should happen takes this long, even on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Asks again and again until the answer is `Ok`; fails the test with the last `Err` when patience is over.
pub(crate) async fn eventually<T, F>(what: &str, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let deadline = Instant::now() + PATIENCE;
    loop {
        match ask().await {
            Ok(value) => return value,
            Err(problem) if Instant::now() >= deadline => {
                panic!("{what}: not within {PATIENCE:?}: {problem}")
            }
            Err(_) => sleep(Duration::from_millis(25)).await,
        }
    }
}

/// A number from the environment, for the long runs of `make chaos`.
pub(crate) fn setting(name: &str, default: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")),
        Err(_) => default,
    }
}
