//! The verdict over what the scans found: where the log ends, and what of it is damaged.
//!
//! Pure. The rule: what lies below a position that is proven to have been synced must be readable, or it is damage; what
//! lies above may be torn, and the log ends at the first place that is.
//!
//! Proofs: every mark (each batch says what was synced before it), every segment's header, and the floor.
//!
//! Invariants:
//! - Nothing that was synced is ever taken for a torn tail, as far as any proof of it is left.
//! - Damage that a `Settled` record names is known already: it has become quarantines, which stand on their own.
//!
//! Not here: which groups are hit (`replay`).

use super::scan::{Body, SegmentScan};
use crate::log::record::RecordKind;
use crate::log::segment::{HeaderCheck, Position, file_name};
use std::collections::{BTreeMap, BTreeSet};

/// Where the log ends, and what of it is damaged.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The end of the log: what lies behind is torn. `None` if there is no segment to go on with.
    pub(crate) end: Option<Position>,
    /// New damage that hides whose records it hit, in words.
    pub(crate) damage: Vec<String>,
    /// For each segment, where its records end.
    pub(crate) ends: BTreeMap<u64, u64>,
}

/// Judges the scans, from the first segment that must be there on.
pub(crate) fn judge(first: u64, synced: Position, scans: &BTreeMap<u64, SegmentScan>) -> Verdict {
    let proven =
        scans.iter().filter_map(|(&number, scan)| scan.proven(number)).max().unwrap_or_default().max(synced);
    let settled = settled(scans);
    let mut verdict = Verdict::default();
    let mut found: Vec<String> = Vec::new();
    let last = scans.keys().next_back().copied().unwrap_or(0).max(proven.segment);
    for number in first..=last {
        let Some(scan) = scans.get(&number) else {
            if number <= proven.segment {
                found.push(format!("segment {} is missing", file_name(number)));
                continue;
            }
            break;
        };
        let is_good = matches!(scan.header, HeaderCheck::Good(_));
        let is_begun = scan.end_of_previous().is_some() || number == first;
        if number > proven.segment && !(is_good && is_begun) {
            // A segment that was being prepared, or whose first batch is torn.
            break;
        }
        if !is_good {
            found.push(format!("segment {} has a bad header", file_name(number)));
        }
        let next = scans.get(&(number + 1)).and_then(SegmentScan::end_of_previous);
        let known_end = next.filter(|end| end.segment == number).map(|end| end.offset);
        let bound = known_end.unwrap_or(u64::MAX);
        let mut torn = None;
        for &offset in scan.gaps.iter().filter(|&&offset| offset < bound) {
            let at = Position { segment: number, offset };
            if at < proven {
                found.push(format!("segment {} is unreadable at offset {offset}", file_name(number)));
            } else {
                torn = torn.min_with(offset);
            }
        }
        for record in scan.records.iter().filter(|record| record.offset < bound && record.body == Body::Bad) {
            // Below the proven position, replay finds out whether anybody misses it.
            if (Position { segment: number, offset: record.offset }) >= proven {
                torn = torn.min_with(record.offset);
            }
        }
        let end = scan.end.min(bound);
        let required = if number == proven.segment { known_end.unwrap_or(proven.offset) } else { bound };
        if torn.is_none() && end < required && number <= proven.segment {
            found.push(format!("segment {} ends at offset {end}, though more was synced", file_name(number)));
        }
        let end = torn.unwrap_or(end);
        verdict.ends.insert(number, end);
        verdict.end = Some(Position { segment: number, offset: end });
        if torn.is_some() {
            break;
        }
    }
    verdict.damage = found.into_iter().filter(|what| !settled.contains(what)).collect();
    verdict
}

/// Damage that is known already.
fn settled(scans: &BTreeMap<u64, SegmentScan>) -> BTreeSet<String> {
    let mut settled = BTreeSet::new();
    for record in scans.values().flat_map(|scan| &scan.records) {
        if let (RecordKind::Settled, Body::Good(damage)) = (record.header.kind, &record.body) {
            settled.extend(String::from_utf8_lossy(damage).lines().map(str::to_owned));
        }
    }
    settled
}

trait MinWith {
    fn min_with(self, offset: u64) -> Self;
}

impl MinWith for Option<u64> {
    fn min_with(self, offset: u64) -> Self {
        Some(self.map_or(offset, |known| known.min(offset)))
    }
}
