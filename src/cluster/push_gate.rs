//! Which groups take no pushes now, because a disk is full.
//!
//! Invariant: asking costs one load while every group takes them.
//!
//! Not here: deciding it (`disk_keeper.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use evershard_proto::v1::ErrorKind;

use crate::service::RequestError;

/// A full disk is not emptied in a moment.
const RETRY_AFTER_MS: u32 = 250;

/// See the module.
#[derive(Debug, Default)]
pub struct PushGate {
    is_any_shut: AtomicBool,
    shut: ArcSwap<HashMap<u64, String>>,
}

impl PushGate {
    /// Whether `group` takes pushes.
    ///
    /// # Errors
    /// EXHAUSTED, naming the disk, with a pause to make before the next try.
    pub fn check(&self, group: u64) -> Result<(), RequestError> {
        if !self.is_any_shut.load(Ordering::Relaxed) {
            return Ok(());
        }
        let shut = self.shut.load();
        let Some(reason) = shut.get(&group) else { return Ok(()) };
        let what = format!("group {group} takes no pushes: {reason}");
        let mut error = RequestError::new(ErrorKind::Exhausted, what).in_group(group);
        error.0.retry_after_ms = RETRY_AFTER_MS;
        Err(error)
    }

    /// From now on these take none, with the reason.
    pub fn set(&self, shut: HashMap<u64, String>) {
        if shut.is_empty() && !self.is_any_shut.load(Ordering::Relaxed) {
            return;
        }
        let is_any_shut = !shut.is_empty();
        self.shut.store(Arc::new(shut));
        self.is_any_shut.store(is_any_shut, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shut_group_says_why_and_when_to_ask_again() {
        let gate = PushGate::default();
        assert!(gate.check(1).is_ok());
        gate.set(HashMap::from([(1, "node 2 has 3 bytes free".to_owned())]));
        let error = gate.check(1).expect_err("shut");
        assert_eq!((error.kind(), error.0.group, error.0.retry_after_ms), (ErrorKind::Exhausted, 1, 250));
        assert!(error.to_string().contains("3 bytes free"), "{error}");
        assert!(gate.check(2).is_ok(), "another group");
        gate.set(HashMap::new());
        assert!(gate.check(1).is_ok());
    }
}
