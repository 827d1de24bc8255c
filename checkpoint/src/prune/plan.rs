//! Which checkpoints stay.

use std::collections::BTreeSet;

use crate::name::CheckpointName;

const HOUR_MS: u64 = 60 * 60 * 1000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// Rules; a checkpoint that one of them keeps stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    last: usize,
    hourly: usize,
    daily: usize,
}

/// No rule keeps anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a rule must keep something: the last n, n hourly or n daily ones")]
pub struct KeepError;

impl Keep {
    /// Keeps the last `last` checkpoints; of each of the last `hourly` hours that have one, and of each of the last `daily` days, the
    /// newest. Hours and days are those of UTC. The newest checkpoint always stays.
    ///
    /// # Errors
    /// No rule keeps anything.
    pub fn new(last: usize, hourly: usize, daily: usize) -> Result<Self, KeepError> {
        if last == 0 && hourly == 0 && daily == 0 { Err(KeepError) } else { Ok(Keep { last, hourly, daily }) }
    }

    /// Parts checkpoints, by the time at which they were cut, into those that stay and those that go: each the newest first.
    pub(super) fn part(
        self,
        mut checkpoints: Vec<(u64, CheckpointName)>,
    ) -> (Vec<CheckpointName>, Vec<CheckpointName>) {
        checkpoints.sort_by(|a, b| b.cmp(a));
        let (mut hours, mut days) = (BTreeSet::new(), BTreeSet::new());
        let is_newest_of = |periods: &mut BTreeSet<u64>, period: u64, most: usize| {
            periods.len() < most && periods.insert(period)
        };
        let (mut stay, mut go) = (Vec::new(), Vec::new());
        for (place, (created_ms, name)) in checkpoints.into_iter().enumerate() {
            // Both are asked: a checkpoint counts for its hour and for its day.
            let is_hourly = is_newest_of(&mut hours, created_ms / HOUR_MS, self.hourly);
            let is_daily = is_newest_of(&mut days, created_ms / DAY_MS, self.daily);
            let stays = place < self.last.max(1) || is_hourly || is_daily;
            if stays { stay.push(name) } else { go.push(name) }
        }
        (stay, go)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(keep: (usize, usize, usize), minutes: &[u64]) -> Vec<u64> {
        let keep = Keep::new(keep.0, keep.1, keep.2).expect("a rule");
        let name = |minute: &u64| (minute * 60_000, format!("m{minute:09}").parse().expect("a name"));
        let (stay, _) = keep.part(minutes.iter().map(name).collect());
        stay.iter().map(|name| name.as_str()[1..].parse().expect("a number")).collect()
    }

    #[test]
    fn each_rule_keeps_what_it_says() {
        let day = 24 * 60;
        let minutes = [0, 10, 59, 60, 61, 180, day, day + 5, 3 * day];
        assert_eq!(part((1, 0, 0), &minutes), [3 * day]);
        assert_eq!(part((3, 0, 0), &minutes), [3 * day, day + 5, day]);
        assert_eq!(part((0, 4, 0), &minutes), [3 * day, day + 5, 180, 61], "hours that have one");
        assert_eq!(part((0, 0, 2), &minutes), [3 * day, day + 5]);
        assert_eq!(part((0, 0, 9), &minutes), [3 * day, day + 5, 180]);
        assert_eq!(part((2, 0, 3), &minutes), [3 * day, day + 5, 180]);
        assert_eq!(part((99, 0, 0), &minutes).len(), minutes.len());
        assert_eq!(part((1, 1, 1), &[]), [0_u64; 0]);
        assert_eq!(Keep::new(0, 0, 0), Err(KeepError));
    }

    proptest! {
        #[test]
        fn a_looser_rule_keeps_no_less(
            minutes in prop::collection::btree_set(0..20_000_u64, 0..40),
            keep in (0..5_usize, 0..5_usize, 0..5_usize),
            more in (0..3_usize, 0..3_usize, 0..3_usize),
        ) {
            prop_assume!(keep != (0, 0, 0));
            let minutes: Vec<u64> = minutes.into_iter().collect();
            let stay: BTreeSet<u64> = part(keep, &minutes).into_iter().collect();
            let stay_more: BTreeSet<u64> =
                part((keep.0 + more.0, keep.1 + more.1, keep.2 + more.2), &minutes).into_iter().collect();
            prop_assert!(stay.is_subset(&stay_more));
            prop_assert!(minutes.last().is_none_or(|newest| stay.contains(newest)));
            prop_assert!(stay.len() <= keep.0.max(1) + keep.1 + keep.2);
        }
    }
}
