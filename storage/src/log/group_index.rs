//! A group's log in memory: where each entry is, the recent ones themselves, the vote, and what is durable.
//!
//! Pure: no I/O, no threads, no clock. Callers change it when they ask for something; the writer publishes where it
//! went once it is durable.
//!
//! Invariants:
//! - `slots` are consecutive from `first`; `cached` are the last `cached.len()` of them.
//! - An entry that is not published yet is cached.
//! - A ticket says which append filled a slot, so publishing an append that was truncated meanwhile touches nothing.
//! - `live` counts the bytes of published entries until the operation that dropped them is published: until then
//!   recovery would need them.
//!
//! Not here: locks and waiters (`group`), reading the disk (`reader`).

use super::anchors::Anchors;
use super::record::record_bytes;
use super::segment::Position;
use super::{Entry, EntryId, GroupKey, GroupLogState, QuarantineCause};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;

/// Memory of a cached entry beside its payload.
const CACHED_OVERHEAD: u64 = 96;

/// Where an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In the queue, put there by the append with this ticket.
    Queued(u64),
    /// In a segment.
    At(Position),
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    term: u64,
    leader: u64,
    place: Place,
    body_len: u32,
    /// Bytes of the group's log up to and including this entry.
    bytes_through: u64,
}

/// Bytes dropped from segments, not yet durably.
#[derive(Debug, Default)]
pub(super) struct Freed(BTreeMap<u64, u64>);

/// Why an append was refused: the index that would have fitted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misplaced {
    pub(super) expected: u64,
    pub(super) found: u64,
}

/// Where an entry can be read.
#[derive(Debug, Clone)]
pub(super) enum Source {
    Memory(Entry),
    Disk(OnDisk),
}

/// An entry in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OnDisk {
    pub(super) index: u64,
    pub(super) position: Position,
    pub(super) body_len: u32,
}

/// An entry as recovery found it.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecoveredEntry {
    pub(super) term: u64,
    pub(super) leader: u64,
    pub(super) position: Position,
    pub(super) body_len: u32,
}

/// A group's log in memory.
#[derive(Debug, Default)]
pub(super) struct GroupIndex {
    pub(super) vote: Option<Bytes>,
    pub(super) committed: Option<Bytes>,
    /// A write of `committed` waits in the queue; it will take the value of then.
    pub(super) is_committed_queued: bool,
    pub(super) quarantine: Option<(QuarantineCause, String)>,
    pub(super) anchors: Anchors,
    pub(super) is_destroyed: bool,
    purged: Option<EntryId>,
    first: u64,
    slots: VecDeque<Slot>,
    cached: VecDeque<Entry>,
    cached_bytes: u64,
    durable: Option<u64>,
    next_ticket: u64,
    bytes_total: u64,
    live: BTreeMap<u64, u64>,
}

impl GroupIndex {
    /// Whether damage was found: nothing of it can be used.
    pub(super) fn is_spoiled(&self) -> bool {
        matches!(self.quarantine, Some((QuarantineCause::Damage, _)))
    }

    /// The error for whoever goes on with a log of which nothing can be used.
    pub(super) fn check_whole(&self, key: GroupKey) -> io::Result<()> {
        let Some((QuarantineCause::Damage, reason)) = &self.quarantine else { return Ok(()) };
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("the log of {key} is damaged: {reason}")))
    }

    /// The damage is written down, in this segment: nothing else of the group is needed any more.
    pub(super) fn publish_damage(&mut self, segment: u64) {
        self.anchors = Anchors { quarantine: Some(segment), ..Anchors::default() };
        self.live.clear();
    }

    /// A group of which nothing can be used.
    pub(super) fn unusable(anchors: Anchors) -> Self {
        GroupIndex { anchors, ..GroupIndex::default() }
    }

    /// As recovery found it: consecutive durable entries.
    pub(super) fn recovered(purged: Option<EntryId>, entries: &BTreeMap<u64, RecoveredEntry>) -> Self {
        let mut index = GroupIndex { purged, ..GroupIndex::default() };
        let next = purged.map_or(0, |id| id.index + 1);
        index.first = entries.keys().next().copied().unwrap_or(next);
        for entry in entries.values() {
            let bytes = record_bytes(entry.body_len as usize);
            index.bytes_total += bytes;
            *index.live.entry(entry.position.segment).or_default() += bytes;
            index.slots.push_back(Slot {
                term: entry.term,
                leader: entry.leader,
                place: Place::At(entry.position),
                body_len: entry.body_len,
                bytes_through: index.bytes_total,
            });
        }
        index.durable = index.last().map(|id| id.index);
        index
    }

    /// Takes the entries in; they must follow the last one without a gap. Returns the ticket to publish them with.
    pub(super) fn append(&mut self, entries: &[Entry]) -> Result<u64, Misplaced> {
        let is_blank = self.slots.is_empty() && self.purged.is_none();
        let start = if is_blank { entries.first().map_or(0, |entry| entry.index) } else { self.next() };
        for (expected, entry) in (start..).zip(entries) {
            if entry.index != expected || entry.index == u64::MAX {
                return Err(Misplaced { expected, found: entry.index });
            }
        }
        if is_blank && let Some(entry) = entries.first() {
            self.first = entry.index;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        for entry in entries {
            self.bytes_total += record_bytes(entry.payload.len());
            self.slots.push_back(Slot {
                term: entry.term,
                leader: entry.leader,
                place: Place::Queued(ticket),
                body_len: entry.payload.len() as u32,
                bytes_through: self.bytes_total,
            });
            self.cached_bytes += cached_bytes(entry);
            self.cached.push_back(entry.clone());
        }
        Ok(ticket)
    }

    /// The append with this ticket went to these offsets of a segment, durably.
    pub(super) fn publish_append(&mut self, ticket: u64, first: u64, segment: u64, offsets: &[u64]) {
        for (index, &offset) in (first..).zip(offsets) {
            let Some(slot) = index.checked_sub(self.first).and_then(|at| self.slots.get_mut(at as usize))
            else {
                continue;
            };
            if slot.place == Place::Queued(ticket) {
                slot.place = Place::At(Position { segment, offset });
                *self.live.entry(segment).or_default() += record_bytes(slot.body_len as usize);
                self.durable = self.durable.max(Some(index));
            }
        }
    }

    /// Drops the entries from `index` on.
    pub(super) fn truncate_from(&mut self, index: u64) -> Freed {
        let mut freed = Freed::default();
        while self.next() > index
            && let Some(slot) = self.slots.pop_back()
        {
            freed.add(&slot);
            self.bytes_total = slot.bytes_through - record_bytes(slot.body_len as usize);
            if let Some(entry) = self.cached.pop_back() {
                self.cached_bytes -= cached_bytes(&entry);
            }
        }
        let last = self.last().map(|id| id.index);
        self.durable = self.durable.min(last);
        freed
    }

    /// Drops the entries up to `id`. May lie beyond the last one: then the log is empty and goes on after `id`.
    /// `None` if all of them are gone already.
    pub(super) fn purge_through(&mut self, id: EntryId) -> Option<Freed> {
        // Directly below the first entry counts when nothing was purged yet: a log may begin with entry 1, and the
        // purge of entry 0 says what came before it.
        let is_done = match self.purged {
            Some(purged) => id.index <= purged.index,
            None => !self.slots.is_empty() && id.index + 1 < self.first,
        };
        if id.index == u64::MAX || is_done {
            return None;
        }
        let mut freed = Freed::default();
        while self.first <= id.index
            && let Some(slot) = self.slots.pop_front()
        {
            freed.add(&slot);
            self.first += 1;
            if self.cached.len() > self.slots.len() {
                self.uncache_first();
            }
        }
        if self.slots.is_empty() {
            self.first = id.index + 1;
        }
        self.purged = Some(id);
        Some(freed)
    }

    /// The truncation or purge that freed these bytes is durable.
    pub(super) fn publish_freed(&mut self, freed: &Freed) {
        for (segment, bytes) in &freed.0 {
            if let Some(live) = self.live.get_mut(segment) {
                *live = live.saturating_sub(*bytes);
                if *live == 0 {
                    self.live.remove(segment);
                }
            }
        }
    }

    /// A purge is durable; what it replaced counts as durable too.
    pub(super) fn publish_purge(&mut self, id: EntryId, freed: &Freed) {
        self.publish_freed(freed);
        // A purge beyond the end (an installed snapshot) stands for entries that never were here.
        if self.last().is_some_and(|last| last.index >= id.index) {
            self.durable = self.durable.max(Some(id.index));
        }
    }

    /// Whether the entry is still the one at this place.
    pub(super) fn is_at(&self, index: u64, position: Position) -> bool {
        !self.is_destroyed && self.slot(index).is_some_and(|slot| slot.place == Place::At(position))
    }

    /// The entry was copied forward, durably; if it is still wanted, it is there now.
    pub(super) fn publish_relocation(&mut self, from: OnDisk, to: Position) {
        let Some(slot) = from.index.checked_sub(self.first).and_then(|at| self.slots.get_mut(at as usize))
        else {
            return;
        };
        if slot.place == Place::At(from.position) {
            slot.place = Place::At(to);
            let bytes = record_bytes(slot.body_len as usize);
            *self.live.entry(to.segment).or_default() += bytes;
            self.publish_freed(&Freed(BTreeMap::from([(from.position.segment, bytes)])));
        }
    }

    /// Forgets the oldest cached entries, as far as they are durable, until `bytes` are left.
    pub(super) fn evict_to(&mut self, bytes: u64) {
        while self.cached_bytes > bytes
            && let Some(entry) = self.cached.front()
            && Some(entry.index) <= self.durable
        {
            self.uncache_first();
        }
    }

    /// The group is forgotten: nothing can be read any more. What recovery would need stays counted.
    pub(super) fn destroy(&mut self) {
        self.is_destroyed = true;
        self.slots.clear();
        self.cached.clear();
        self.cached_bytes = 0;
    }

    fn uncache_first(&mut self) {
        if let Some(entry) = self.cached.pop_front() {
            self.cached_bytes -= cached_bytes(&entry);
        }
    }

    /// Where to read the entries of `range` that exist: at least one, then while they fit `bytes_max`.
    pub(super) fn sources(&self, range: Range<u64>, bytes_max: u64) -> Vec<Source> {
        let mut sources = Vec::new();
        let mut bytes = 0;
        let cached_from = self.cached_from();
        for index in range.start.max(self.first)..range.end.min(self.next()) {
            let slot = &self.slots[(index - self.first) as usize];
            bytes += u64::from(slot.body_len);
            if !sources.is_empty() && bytes > bytes_max {
                break;
            }
            sources.push(match slot.place {
                _ if index >= cached_from => {
                    Source::Memory(self.cached[(index - cached_from) as usize].clone())
                }
                Place::At(position) => Source::Disk(OnDisk { index, position, body_len: slot.body_len }),
                // Unpublished entries are always cached.
                Place::Queued(_) => break,
            });
        }
        sources
    }

    /// Whether reading this range would go to the disk.
    pub(super) fn needs_disk(&self, range: &Range<u64>) -> bool {
        let start = range.start.max(self.first);
        start < range.end.min(self.next()) && start < self.cached_from()
    }

    /// The entries that are in this segment, up to about `bytes_max`.
    pub(super) fn entries_in(&self, segment: u64, bytes_max: u64) -> Vec<OnDisk> {
        let mut found = Vec::new();
        let mut bytes = 0;
        if !self.live.contains_key(&segment) {
            return found;
        }
        for (index, slot) in (self.first..).zip(&self.slots) {
            if let Place::At(position) = slot.place
                && position.segment == segment
            {
                found.push(OnDisk { index, position, body_len: slot.body_len });
                bytes += record_bytes(slot.body_len as usize);
                if bytes >= bytes_max {
                    break;
                }
            }
        }
        found
    }

    pub(super) fn state(&self) -> GroupLogState {
        GroupLogState {
            last_purged: self.purged,
            first: self.first,
            last: self.last(),
            durable_index: self.durable,
        }
    }

    pub(super) fn purged(&self) -> Option<EntryId> {
        self.purged
    }

    pub(super) fn durable(&self) -> Option<u64> {
        self.durable
    }

    pub(super) fn entry_id(&self, index: u64) -> Option<EntryId> {
        self.slot(index).map(|slot| EntryId { index, term: slot.term, leader: slot.leader })
    }

    /// Log bytes of the entries after `index`.
    pub(super) fn bytes_since(&self, index: u64) -> u64 {
        let before = match (self.slot(index), self.slots.front()) {
            (Some(slot), _) => slot.bytes_through,
            (None, Some(front)) if index < self.first => {
                front.bytes_through - record_bytes(front.body_len as usize)
            }
            _ => self.bytes_total,
        };
        self.bytes_total - before
    }

    pub(super) fn cached_bytes(&self) -> u64 {
        self.cached_bytes
    }

    /// Bytes of records recovery would need.
    pub(super) fn live_bytes(&self) -> u64 {
        let anchors = self.anchor_bytes();
        self.live.values().sum::<u64>() + anchors.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// Bytes of records in this segment that recovery would need.
    pub(super) fn live_bytes_in(&self, segment: u64) -> u64 {
        let anchors = self.anchor_bytes();
        let anchors = anchors.iter().filter(|(anchor, _)| *anchor == Some(segment)).map(|(_, bytes)| bytes);
        self.live.get(&segment).copied().unwrap_or(0) + anchors.sum::<u64>()
    }

    fn anchor_bytes(&self) -> [(Option<u64>, u64); 5] {
        let body = |body: &Option<Bytes>| record_bytes(body.as_ref().map_or(0, Bytes::len));
        let reason = self.quarantine.as_ref().map_or(0, |(_, reason)| reason.len());
        [
            (self.anchors.create, record_bytes(0)),
            (self.anchors.vote, body(&self.vote)),
            (self.anchors.committed, body(&self.committed)),
            (self.anchors.purge, record_bytes(0)),
            (self.anchors.quarantine, record_bytes(reason)),
        ]
    }

    /// The oldest segment recovery would need for this group.
    pub(super) fn oldest_segment(&self) -> Option<u64> {
        self.live.keys().next().copied().into_iter().chain(self.anchors.oldest()).min()
    }

    fn slot(&self, index: u64) -> Option<&Slot> {
        self.slots.get(usize::try_from(index.checked_sub(self.first)?).ok()?)
    }

    fn next(&self) -> u64 {
        self.first + self.slots.len() as u64
    }

    fn cached_from(&self) -> u64 {
        self.next() - self.cached.len() as u64
    }

    fn last(&self) -> Option<EntryId> {
        match self.slots.len() {
            0 => self.purged,
            _ => self.entry_id(self.next() - 1),
        }
    }
}

impl Freed {
    fn add(&mut self, slot: &Slot) {
        if let Place::At(position) = slot.place {
            *self.0.entry(position.segment).or_default() += record_bytes(slot.body_len as usize);
        }
    }
}

fn cached_bytes(entry: &Entry) -> u64 {
    entry.payload.len() as u64 + CACHED_OVERHEAD
}
