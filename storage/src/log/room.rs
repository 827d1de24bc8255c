//! What room the log has on its disk.
//!
//! Space is taken ahead: beside the segment being written and the one prepared to follow it there is a spare, allocated
//! when the log is opened and whenever one was used. While there is a spare the log has room. When none can be made the
//! disk is full, and what was allocated before is the reserve: it is for what was accepted already, and for what a group
//! cannot live without (votes, the first entry of a leader, memberships, purges). Only when that is used up too does the
//! writer stop, with everything kept in its queue, until a try succeeds.
//!
//! Invariant: a full disk is no failure of the log; nothing is dropped, and nothing is acknowledged before it is written.
//!
//! Not here: making spares (`chores`), waiting (`node_log`), who is told (the server).

use super::error::LogError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What room the log has on its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogRoom {
    /// Space is allocated ahead of what is written.
    Ample,
    /// The disk is full: so many bytes are left that were allocated before.
    Reserve {
        /// What is allocated and not yet written, nor asked for by what waits for the writer.
        bytes: u64,
    },
    /// The disk is full and the reserve used up: what is appended waits, and so do votes.
    Out,
}

/// What the writer and the chores know of it.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Allocated in the segment being written, behind the last record.
    left_in_active: AtomicU64,
    /// No spare could be made.
    is_full: AtomicBool,
    /// The writer could not go on.
    is_out: AtomicBool,
    /// A batch did not fit: what remains is for operations one by one.
    is_narrow: AtomicBool,
}

impl Room {
    pub(super) fn set_left(&self, bytes: u64) {
        self.left_in_active.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn left(&self) -> u64 {
        self.left_in_active.load(Ordering::Relaxed)
    }

    /// Whether no spare could be made.
    pub(super) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    pub(super) fn is_out(&self) -> bool {
        self.is_out.load(Ordering::Relaxed)
    }

    /// Bytes to take into the next batch: one operation, where many did not fit.
    pub(super) fn batch_bytes(&self, bytes_max: u64) -> u64 {
        if self.is_narrow.load(Ordering::Relaxed) { 1 } else { bytes_max }
    }

    /// A batch of several operations did not fit.
    pub(super) fn note_narrow(&self) {
        self.is_full.store(true, Ordering::Relaxed);
        self.is_narrow.store(true, Ordering::Relaxed);
    }

    /// A spare was made, or there is one.
    pub(super) fn note_spare(&self) {
        self.is_narrow.store(false, Ordering::Relaxed);
        if self.is_full.swap(false, Ordering::Relaxed) {
            tracing::info!("the log has room again");
        }
    }

    /// No spare could be made.
    pub(super) fn note_full(&self, error: &LogError) {
        if !self.is_full.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "the log's disk is full: it goes on with the space it reserved before");
        }
    }

    /// A batch was written.
    pub(super) fn note_written(&self) {
        if self.is_out.swap(false, Ordering::Relaxed) {
            tracing::info!("the log is written again");
        }
    }

    /// An operation could not be written.
    pub(super) fn note_out(&self, error: &LogError) {
        self.is_full.store(true, Ordering::Relaxed);
        if !self.is_out.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "the log's disk is full and its reserve used up: it waits for space");
        }
    }
}
