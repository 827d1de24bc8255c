//! A batch: what one gather write and one sync make durable.
//!
//! Operations become records here, bodies as slices of what the callers gave; after the sync the same list tells each
//! group where its records went, and each caller that they are durable.
//!
//! Invariants:
//! - A batch lies in one segment and starts with a mark.
//! - What a relocation copies is looked up while encoding: what was truncated or purged meanwhile is left out, so its
//!   record cannot come after the one that removed it.
//! - Publishing and callbacks go in the order of the operations.
//!
//! Not here: writing and syncing (`writer`).

use super::group::Group;
use super::group_index::OnDisk;
use super::queue::{Action, Operation};
use super::record::{ALIGNMENT, RecordHeader, RecordKind, Seed, record_bytes};
use super::segment::Position;
use super::{GroupKey, QuarantineCause};
use bytes::Bytes;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

/// A piece of the gather write: of the batch's own small bytes, or a body as it was given.
enum Piece {
    Small(Range<usize>),
    Body(Bytes),
}

/// Records being put together for one segment.
pub(super) struct Batch {
    seed: Seed,
    start: Position,
    bytes: u64,
    small: Vec<u8>,
    pieces: Vec<Piece>,
}

/// Where an operation's entries went.
#[derive(Debug, Default)]
pub(super) struct Placed {
    offsets: Vec<u64>,
    relocated: Vec<(OnDisk, u64)>,
    has_vote: bool,
    has_committed: bool,
    has_purge: bool,
    has_quarantine: bool,
    has_create: bool,
}

impl Batch {
    /// An empty batch at this place; it says what was synced before.
    pub(super) fn new(start: Position, synced: Position) -> Self {
        let seed = Seed::of_segment(start.segment);
        let mut batch = Batch { seed, start, bytes: 0, small: Vec::new(), pieces: Vec::new() };
        batch.put(RecordHeader::mark(synced), Bytes::new());
        batch
    }

    /// Bytes of the batch.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it holds nothing but its mark.
    pub(super) fn is_blank(&self) -> bool {
        self.bytes == record_bytes(0)
    }

    /// Adds a record; returns its offset in the segment.
    pub(super) fn put(&mut self, mut header: RecordHeader, body: Bytes) -> u64 {
        let offset = self.start.offset + self.bytes;
        let encoded = header.encode(self.seed, &body);
        self.small(&encoded);
        let body_len = body.len();
        if body_len > 0 {
            self.pieces.push(Piece::Body(body));
        }
        let padding = body_len.next_multiple_of(ALIGNMENT) - body_len;
        self.small(&[0; ALIGNMENT][..padding]);
        self.bytes += header.record_bytes();
        offset
    }

    fn small(&mut self, bytes: &[u8]) {
        let start = self.small.len();
        self.small.extend_from_slice(bytes);
        match self.pieces.last_mut() {
            Some(Piece::Small(range)) if range.end == start => range.end = self.small.len(),
            _ if bytes.is_empty() => {}
            _ => self.pieces.push(Piece::Small(start..self.small.len())),
        }
    }

    /// The gather write.
    pub(super) fn slices(&self) -> Vec<IoSlice<'_>> {
        self.pieces
            .iter()
            .map(|piece| match piece {
                Piece::Small(range) => IoSlice::new(&self.small[range.clone()]),
                Piece::Body(body) => IoSlice::new(body),
            })
            .collect()
    }

    /// Adds an operation's records.
    pub(super) fn add(&mut self, operation: &Operation) -> Placed {
        let key = operation.group.key;
        let mut placed = Placed::default();
        match &operation.action {
            Action::Append { entries, .. } => {
                placed.offsets.reserve(entries.len());
                for entry in entries {
                    placed.offsets.push(self.put(RecordHeader::entry(key, entry), entry.payload.clone()));
                }
            }
            Action::Vote(vote) => {
                self.put(RecordHeader::new(RecordKind::Vote, key), vote.clone());
                placed.has_vote = true;
            }
            Action::Committed => {
                let mut index = operation.group.lock();
                index.is_committed_queued = false;
                if let Some(committed) = &index.committed {
                    self.put(RecordHeader::new(RecordKind::Committed, key), committed.clone());
                    placed.has_committed = true;
                }
            }
            Action::Truncate { index, .. } => {
                self.put(
                    RecordHeader { index: *index, ..RecordHeader::new(RecordKind::Truncate, key) },
                    Bytes::new(),
                );
            }
            Action::Purge { id, .. } => {
                let header = RecordHeader {
                    index: id.index,
                    term: id.term,
                    leader: id.leader,
                    ..RecordHeader::new(RecordKind::Purge, key)
                };
                self.put(header, Bytes::new());
                placed.has_purge = true;
            }
            Action::Create => {
                self.put(RecordHeader::new(RecordKind::Create, key), Bytes::new());
                placed.has_create = true;
            }
            Action::Destroy => {
                self.put(RecordHeader::new(RecordKind::Destroy, key), Bytes::new());
            }
            Action::Quarantine { cause, reason } => {
                self.put_quarantine(key, *cause, reason);
                placed.has_quarantine = true;
            }
            Action::Release => {
                self.put(RecordHeader::new(RecordKind::Release, key), Bytes::new());
            }
            Action::Relocate { entries, anchors } => {
                if *anchors {
                    self.put_anchors(&operation.group, &mut placed);
                }
                let index = operation.group.lock();
                for (from, entry) in entries.iter().filter(|(from, _)| index.is_at(from.index, from.position))
                {
                    let header = RecordHeader { is_relocated: true, ..RecordHeader::entry(key, entry) };
                    placed.relocated.push((*from, self.put(header, entry.payload.clone())));
                }
            }
        }
        placed
    }

    pub(super) fn put_quarantine(&mut self, key: GroupKey, cause: QuarantineCause, reason: &str) {
        let header =
            RecordHeader { entry_kind: cause.number(), ..RecordHeader::new(RecordKind::Quarantine, key) };
        self.put(header, Bytes::copy_from_slice(reason.as_bytes()));
    }

    /// The group's present state, once more. Newer than what is durable does no harm: it only comes earlier (of the
    /// commit position that is no news: see `GroupLog::save_committed`).
    fn put_anchors(&mut self, group: &Arc<Group>, placed: &mut Placed) {
        let index = group.lock();
        if index.is_destroyed {
            return;
        }
        self.put(RecordHeader::new(RecordKind::Create, group.key), Bytes::new());
        placed.has_create = true;
        if let Some(vote) = &index.vote {
            self.put(RecordHeader::new(RecordKind::Vote, group.key), vote.clone());
            placed.has_vote = true;
        }
        if let Some(committed) = &index.committed {
            self.put(RecordHeader::new(RecordKind::Committed, group.key), committed.clone());
            placed.has_committed = true;
        }
        if let Some(id) = index.purged() {
            let header = RecordHeader {
                index: id.index,
                term: id.term,
                leader: id.leader,
                ..RecordHeader::new(RecordKind::Purge, group.key)
            };
            self.put(header, Bytes::new());
            placed.has_purge = true;
        }
        if let Some((cause, reason)) = &index.quarantine {
            self.put_quarantine(group.key, *cause, reason);
            placed.has_quarantine = true;
        }
    }
}

/// Tells the operation's group that its records are durable in this segment.
pub(super) fn publish(operation: &Operation, placed: &Placed, segment: u64) {
    operation.group.publish(|index| {
        let anchors = &mut index.anchors;
        let anchor = |has: bool, anchor: &mut Option<u64>| {
            if has {
                *anchor = Some(segment);
            }
        };
        anchor(placed.has_create, &mut anchors.create);
        anchor(placed.has_vote, &mut anchors.vote);
        anchor(placed.has_committed, &mut anchors.committed);
        anchor(placed.has_purge, &mut anchors.purge);
        anchor(placed.has_quarantine, &mut anchors.quarantine);
        match &operation.action {
            Action::Append { ticket, entries } => {
                let first = entries.first().map_or(0, |entry| entry.index);
                index.publish_append(*ticket, first, segment, &placed.offsets);
            }
            Action::Truncate { freed, .. } => index.publish_freed(freed),
            Action::Purge { id, freed } => index.publish_purge(*id, freed),
            Action::Relocate { .. } => {
                for (from, offset) in &placed.relocated {
                    index.publish_relocation(*from, Position { segment, offset: *offset });
                }
            }
            Action::Release => index.anchors.quarantine = None,
            Action::Vote(_) | Action::Committed | Action::Create | Action::Destroy => {}
            Action::Quarantine { cause: QuarantineCause::Damage, .. } => index.publish_damage(segment),
            Action::Quarantine { .. } => {}
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Entry;
    use crate::log::group_index::GroupIndex;

    /// A truncation that was queued between reading the entries to copy and queueing the copies comes first in the log.
    #[test]
    fn what_was_dropped_meanwhile_is_not_copied() {
        let start = Position { segment: 7, offset: 32 };
        let entry = |index| Entry { index, term: 1, leader: 1, kind: 0, time_ms: 0, payload: Bytes::new() };
        let mut index = GroupIndex::default();
        let entries = [entry(0), entry(1), entry(2)];
        let ticket = index.append(&entries).unwrap();
        index.publish_append(ticket, 0, 3, &[100, 200, 300]);
        let found = index.entries_in(3, u64::MAX);
        let group = Arc::new(Group::new(GroupKey { group: 1, replica: 2 }, index));
        let entries = found.into_iter().zip(entries).collect();
        let operation = Operation { group, action: Action::Relocate { entries, anchors: false }, done: None };
        let copied = || Batch::new(start, start).add(&operation).relocated.len();
        assert_eq!(copied(), 3);
        operation.group.lock().truncate_from(2);
        assert_eq!(copied(), 2);
        operation.group.lock().destroy();
        assert_eq!(copied(), 0);
    }
}
