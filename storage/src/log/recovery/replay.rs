//! Replaying the records: what each group's log holds at the end.
//!
//! Pure. Records are taken in log order; what is left at the end must be consecutive and readable, or the group is
//! quarantined. So damage to what was truncated, purged, replaced or forgotten later hits nobody.
//!
//! Invariants:
//! - A relocated entry only fills in or moves what is there: it never changes what the log says.
//! - A quarantine stands until the group is forgotten or released.
//!
//! Not here: where the log ends (`verdict`).

use super::scan::{Body, Scanned};
use crate::log::anchors::Anchors;
use crate::log::group_index::{GroupIndex, RecoveredEntry};
use crate::log::record::RecordKind;
use crate::log::segment::{Position, file_name};
use crate::log::{EntryId, GroupKey, QuarantineCause};
use bytes::Bytes;
use std::collections::BTreeMap;

#[derive(Debug)]
struct ReplayedEntry {
    entry: RecoveredEntry,
    is_readable: bool,
}

/// A small record that may have been unreadable.
#[derive(Debug, Default)]
enum Kept {
    #[default]
    Nothing,
    Value(Bytes),
    Unreadable,
}

/// A group, as far as it has been replayed.
#[derive(Debug, Default)]
struct ReplayedGroup {
    entries: BTreeMap<u64, ReplayedEntry>,
    purged: Option<EntryId>,
    vote: Kept,
    committed: Kept,
    anchors: Anchors,
    quarantine: Option<(QuarantineCause, String)>,
    problem: Option<String>,
}

/// All groups, as far as they have been replayed.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    groups: BTreeMap<GroupKey, ReplayedGroup>,
}

impl Replay {
    /// Takes in a record of this segment.
    pub(crate) fn take(&mut self, segment: u64, record: &Scanned) {
        let header = &record.header;
        match header.kind {
            RecordKind::Mark | RecordKind::Settled => {}
            RecordKind::Destroy => {
                self.groups.remove(&header.key);
            }
            _ => self.groups.entry(header.key).or_default().take(segment, record),
        }
    }

    /// The groups, and those of them that are quarantined only now.
    pub(crate) fn finish(self) -> (BTreeMap<GroupKey, GroupIndex>, Vec<(GroupKey, String)>) {
        let mut indexes = BTreeMap::new();
        let mut quarantined = Vec::new();
        for (key, group) in self.groups {
            let (index, problem) = group.finish();
            indexes.insert(key, index);
            if let Some(problem) = problem {
                quarantined.push((key, problem));
            }
        }
        (indexes, quarantined)
    }
}

impl ReplayedGroup {
    fn take(&mut self, segment: u64, record: &Scanned) {
        let header = &record.header;
        match header.kind {
            RecordKind::Entry => self.take_entry(segment, record),
            RecordKind::Vote => {
                self.vote = kept(&record.body);
                self.anchors.vote = Some(segment);
            }
            RecordKind::Committed => {
                self.committed = kept(&record.body);
                self.anchors.committed = Some(segment);
            }
            RecordKind::Truncate => {
                self.entries.split_off(&header.index);
            }
            RecordKind::Purge => {
                let id = EntryId { index: header.index, term: header.term, leader: header.leader };
                self.entries = match id.index.checked_add(1) {
                    Some(next) => self.entries.split_off(&next),
                    None => BTreeMap::new(),
                };
                self.purged = self.purged.max(Some(id));
                self.anchors.purge = Some(segment);
            }
            RecordKind::Create => self.anchors.create = Some(segment),
            RecordKind::Quarantine => {
                let reason = match &record.body {
                    Body::Good(reason) => String::from_utf8_lossy(reason).into_owned(),
                    Body::Bad => "quarantined earlier; the reason is unreadable".to_owned(),
                };
                self.quarantine = Some((QuarantineCause::from_number(header.entry_kind), reason));
                self.anchors.quarantine = Some(segment);
            }
            RecordKind::Release => {
                self.quarantine = None;
                self.anchors.quarantine = None;
            }
            RecordKind::Mark | RecordKind::Settled | RecordKind::Destroy => {}
        }
    }

    fn take_entry(&mut self, segment: u64, record: &Scanned) {
        let header = &record.header;
        if self.purged.is_some_and(|purged| header.index <= purged.index) {
            return;
        }
        let entry = RecoveredEntry {
            term: header.term,
            leader: header.leader,
            position: Position { segment, offset: record.offset },
            body_len: header.body_len,
        };
        let replayed = ReplayedEntry { entry, is_readable: record.body != Body::Bad };
        if header.is_relocated {
            if let Some(known) = self.entries.get(&header.index)
                && (known.entry.term, known.entry.leader) != (entry.term, entry.leader)
            {
                self.report(format!("entry {} was copied forward with another term", header.index));
                return;
            }
        } else if let Some((last, _)) = self.entries.last_key_value()
            && header.index <= *last
        {
            // Holes may yet be filled by relocated entries; but nothing is replaced without a truncation.
            let problem = format!("entry {} follows entry {last}", header.index);
            self.report(problem);
        }
        self.entries.insert(header.index, replayed);
    }

    /// The first problem is the one to tell.
    fn report(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
    }

    /// What is missing at the end.
    fn check(&mut self) {
        let mut expected = self.purged.map(|purged| purged.index + 1);
        for (&index, entry) in &self.entries {
            let problem = if expected.is_some_and(|expected| expected != index) {
                format!("entries before {index} are missing")
            } else if !entry.is_readable {
                let Position { segment, offset } = entry.entry.position;
                format!("entry {index} in segment {} at offset {offset} is unreadable", file_name(segment))
            } else {
                expected = Some(index + 1);
                continue;
            };
            self.problem.get_or_insert(problem);
            return;
        }
        if matches!(self.vote, Kept::Unreadable) {
            self.problem.get_or_insert("the vote is unreadable".to_owned());
        }
        if matches!(self.committed, Kept::Unreadable) {
            self.problem.get_or_insert("the commit position is unreadable".to_owned());
        }
    }

    /// The group's index, and its problem if it is not quarantined for damage already.
    fn finish(mut self) -> (GroupIndex, Option<String>) {
        self.check();
        let is_damaged = self.problem.is_some()
            || self.quarantine.as_ref().is_some_and(|(cause, _)| *cause == QuarantineCause::Damage);
        let mut index = if is_damaged {
            // Nothing of it can be used: it holds no segment back.
            let anchors = Anchors { quarantine: self.anchors.quarantine, ..Anchors::default() };
            GroupIndex::unusable(anchors)
        } else {
            let entries = self.entries.iter().map(|(&index, replayed)| (index, replayed.entry)).collect();
            let mut index = GroupIndex::recovered(self.purged, &entries);
            index.vote = self.vote.value();
            index.committed = self.committed.value();
            index.anchors = self.anchors;
            index
        };
        let is_known = self.quarantine.as_ref().is_some_and(|(cause, _)| *cause == QuarantineCause::Damage);
        let problem = if is_known { None } else { self.problem };
        index.quarantine = self.quarantine;
        (index, problem)
    }
}

impl Kept {
    fn value(self) -> Option<Bytes> {
        match self {
            Kept::Value(value) => Some(value),
            Kept::Nothing | Kept::Unreadable => None,
        }
    }
}

fn kept(body: &Body) -> Kept {
    match body {
        Body::Good(value) => Kept::Value(value.clone()),
        Body::Bad => Kept::Unreadable,
    }
}
