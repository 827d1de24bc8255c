//! Whether a shard's part has all rows, or what changed since the cut before.

use evershard_checkpoint::manifest::{Link, RunEntry, ShardEntry};

/// Links of a chain, its base among them: as many cuts are merged by whoever reads it.
pub const LINKS_MAX: usize = 32;
/// A chain begins anew when its deltas have this part of its base's bytes: whoever restores reads them all.
const DELTAS_PART: u64 = 2;

fn bytes(links: &[Link]) -> u64 {
    links.iter().flat_map(|link| &link.runs).map(|run: &RunEntry| run.bytes).sum()
}

/// The cut that a shard's part can build upon: that of `before`, if its chain may grow, and if the replica that writes has
/// `remembered` what was removed since then (the lowest cut of which that is so; `None` when there is none).
#[must_use]
pub fn builds_upon(before: Option<&ShardEntry>, group: u64, remembered: Option<u64>) -> Option<u64> {
    let before = before.filter(|before| before.group == group)?;
    let (base, deltas) = before.links.split_first()?;
    let may_grow = before.links.len() < LINKS_MAX
        && bytes(deltas).saturating_mul(DELTAS_PART) <= bytes(std::slice::from_ref(base));
    (may_grow && remembered.is_some_and(|known| known <= before.cut)).then_some(before.cut)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use evershard_checkpoint::hash::FileHash;
    use evershard_checkpoint::manifest::{LinkKind, StateEntry};

    use super::*;

    fn entry(bytes: &[u64]) -> ShardEntry {
        let hash = FileHash::of(b"x");
        let run = |bytes| RunEntry { hash, table: 1, rows: 1, first_key: 0, last_key: 0, bytes, crc32: 0 };
        let link = |(number, bytes): (usize, &u64)| Link {
            kind: if number == 0 { LinkKind::Base } else { LinkKind::Delta },
            cut: 10 * (number as u64 + 1),
            runs: vec![run(*bytes)],
            floors: BTreeMap::new(),
        };
        let links: Vec<Link> = bytes.iter().enumerate().map(link).collect();
        let cut = links.last().map_or(0, |link| link.cut);
        let state = StateEntry { hash, bytes: 1, crc32: 0 };
        ShardEntry { shard: 1, group: 7, cut, term: 1, first_key: 0, last_key: u64::MAX, links, state }
    }

    #[test]
    fn a_chain_grows_while_it_is_short_small_and_remembered() {
        let two = entry(&[100, 40]);
        assert_eq!(builds_upon(Some(&two), 7, Some(20)), Some(20));
        assert_eq!(builds_upon(Some(&two), 7, Some(5)), Some(20));
        assert_eq!(builds_upon(None, 7, Some(5)), None);
        assert_eq!(builds_upon(Some(&two), 8, Some(5)), None, "another group");
        assert_eq!(builds_upon(Some(&two), 7, Some(21)), None, "what was removed is forgotten");
        assert_eq!(builds_upon(Some(&two), 7, None), None);
        assert_eq!(builds_upon(Some(&entry(&[100, 40, 11])), 7, Some(20)), None, "half of the base");
        assert_eq!(builds_upon(Some(&entry(&[1; LINKS_MAX])), 7, Some(1)), None);
    }
}
