//! A group's small records that hold a segment: its creation, vote, commit position, purge marker and quarantine.
//!
//! Not here: its entries (`group_index`), copying them forward (`retire`).

/// The latest record of each kind that must outlive its segment: which segment it is in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Anchors {
    pub(super) create: Option<u64>,
    pub(super) vote: Option<u64>,
    pub(super) committed: Option<u64>,
    pub(super) purge: Option<u64>,
    pub(super) quarantine: Option<u64>,
}

impl Anchors {
    /// Whether one of them is in this segment.
    pub(super) fn any_in(&self, segment: u64) -> bool {
        let all = [self.create, self.vote, self.committed, self.purge, self.quarantine];
        all.contains(&Some(segment))
    }

    /// The oldest segment with one of them.
    pub(super) fn oldest(&self) -> Option<u64> {
        [self.create, self.vote, self.committed, self.purge, self.quarantine].into_iter().flatten().min()
    }
}
