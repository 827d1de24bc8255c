//! The segments there are: for readers to find their files, for the chores to find the oldest.
//!
//! Not here: which may go (`retire`).

use super::segment::Segment;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The segments there are, by number, with their bytes.
#[derive(Debug, Default)]
pub(super) struct SegmentSet {
    segments: Mutex<BTreeMap<u64, (Arc<Segment>, u64)>>,
}

impl SegmentSet {
    pub(super) fn insert(&self, segment: Arc<Segment>, bytes: u64) {
        self.segments.lock().insert(segment.number, (segment, bytes));
    }

    pub(super) fn get(&self, number: u64) -> Option<Arc<Segment>> {
        self.segments.lock().get(&number).map(|(segment, _)| segment.clone())
    }

    pub(super) fn set_bytes(&self, number: u64, bytes: u64) {
        if let Some((_, known)) = self.segments.lock().get_mut(&number) {
            *known = bytes;
        }
    }

    pub(super) fn oldest(&self) -> Option<u64> {
        self.segments.lock().keys().next().copied()
    }

    /// Takes out the segments before this one.
    pub(super) fn remove_before(&self, number: u64) -> Vec<Arc<Segment>> {
        let mut segments = self.segments.lock();
        let kept = segments.split_off(&number);
        std::mem::replace(&mut *segments, kept).into_values().map(|(segment, _)| segment).collect()
    }

    /// Number of segments and their bytes.
    pub(super) fn totals(&self) -> (u64, u64) {
        let segments = self.segments.lock();
        (segments.len() as u64, segments.values().map(|(_, bytes)| bytes).sum())
    }
}
