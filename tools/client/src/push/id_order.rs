//! How a section names its rows: by ids in ascending order, where that is shorter, or by keys in order of appearance.
//!
//! Sorting changes nothing that the servers make of a push. Each distinct id of a message has one row, which is the sum of its
//! rows (of values, the last one) before anything is sorted, so that no id's row depends on another's place: rows are updated each
//! for itself, the sums of a step are by id over workers and parts and not within one, and how often an id came goes with its row,
//! as what an encoding leaves out goes with its id. What does follow the order of rows is which of several bad rows a message
//! names first, and which residuals are forgotten first where there is no room for all.
//!
//! Invariants:
//! - ids are sorted within a message: which ids it has does not depend on how they are named;
//! - ids whose code would not be shorter than their keys stay in order of appearance, and most of those are not sorted to find out.
//!
//! Not here: the code (`evershard_proto::push_body`), whether the cluster knows it (the routing table).

use evershard_proto::push_body::{KEY_BYTES, coded_bytes};

/// As many ids of a part are looked at before it is sorted.
const SAMPLE: usize = 64;

/// Brings distinct ids into ascending order and gives them, if that makes them shorter than their keys.
pub(super) fn in_order(distinct: &mut [u32], id_of: impl Fn(u32) -> u64) -> Option<Vec<u64>> {
    let mut order: Vec<(u64, u32)> = distinct.iter().map(|d| (id_of(*d), *d)).collect();
    if !order.is_sorted() {
        if !may_be_short(&order) {
            return None;
        }
        order.sort_unstable();
    }
    let ids: Vec<u64> = order.iter().map(|(id, _)| *id).collect();
    if coded_bytes(&ids) >= ids.len() * KEY_BYTES {
        return None;
    }
    distinct.iter_mut().zip(&order).for_each(|(place, (_, d))| *place = *d);
    Some(ids)
}

/// Whether sorting is worth a try. Of ids without any order, as hashes are, the neighbours in a sample are as much further from
/// each other as the sample is smaller than the whole: so a few of them tell how long the code of all would be.
fn may_be_short(order: &[(u64, u32)]) -> bool {
    if order.len() < SAMPLE * 4 {
        return true;
    }
    let step = order.len() / SAMPLE;
    let mut sample: Vec<u64> = order.iter().step_by(step).map(|(id, _)| *id).collect();
    sample.sort_unstable();
    let gaps = sample.windows(2).map(|pair| ((pair[1] - pair[0]) / step as u64).max(1));
    let bytes: usize = gaps.map(|gap| coded_bytes(&[gap])).sum();
    // Half a byte an id pays for the sort; a sample is right to within that.
    bytes * 2 < (sample.len() - 1) * (KEY_BYTES * 2 - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hashed(count: u64) -> Vec<u64> {
        (0..count).map(|at| evershard_proto::key::mix64(at + 1)).collect()
    }

    fn ordered(ids: &[u64]) -> (Vec<u32>, Option<Vec<u64>>) {
        let mut distinct: Vec<u32> = (0..ids.len() as u32).collect();
        let coded = in_order(&mut distinct, |d| ids[d as usize]);
        (distinct, coded)
    }

    #[test]
    fn ids_with_small_gaps_are_sorted_and_random_ones_stay_as_they_are() {
        assert_eq!(ordered(&[30, 10, 20]), (vec![1, 2, 0], Some(vec![10, 20, 30])));
        assert_eq!(ordered(&[]), (vec![], None));
        for count in [1, 2, 63, 255, 256, 257, 1000, 4096] {
            let all = hashed(count);
            let (distinct, coded) = ordered(&all);
            assert_eq!((distinct, coded), ((0..count as u32).collect(), None), "{count} hashes");
            // In a range of a thousand times as many.
            let dense: Vec<u64> = all.iter().map(|id| id % (count * 1000)).collect();
            let distinct: std::collections::BTreeSet<u64> = dense.iter().copied().collect();
            let dense: Vec<u64> = distinct.into_iter().rev().collect();
            let (order, coded) = ordered(&dense);
            let coded = coded.expect("short");
            assert!(coded_bytes(&coded) <= dense.len() * 3 + 8, "{count}");
            assert_eq!(order, (0..dense.len() as u32).rev().collect::<Vec<_>>());
        }
    }

    #[test]
    fn ids_with_a_field_in_their_high_bits_are_short_though_their_range_is_not() {
        // A feature's number above, a small id below.
        let ids: Vec<u64> = hashed(4000).iter().map(|hash| (hash % 7) << 56 | (hash >> 40)).collect();
        let distinct: std::collections::BTreeSet<u64> = ids.iter().copied().collect();
        let mut ids: Vec<u64> = distinct.into_iter().collect();
        let half = ids.len() / 2;
        ids.rotate_left(half);
        let coded = ordered(&ids).1.expect("short");
        assert!(coded_bytes(&coded) < ids.len() * 3, "{} of {}", coded_bytes(&coded), ids.len());
    }

    #[test]
    fn a_sample_keeps_random_ids_from_being_sorted() {
        let pairs = |ids: &[u64]| ids.iter().zip(0..).map(|(id, d)| (*id, d)).collect::<Vec<_>>();
        assert!(!may_be_short(&pairs(&hashed(256))));
        assert!(!may_be_short(&pairs(&hashed(4096))));
        let dense: Vec<u64> = hashed(4096).iter().map(|id| id >> 40).collect();
        assert!(may_be_short(&pairs(&dense)));
    }

    proptest! {
        #[test]
        fn what_is_coded_is_shorter_and_the_same_ids(
            ids in proptest::collection::hash_set((any::<u64>(), 0..64_u32).prop_map(|(id, shift)| id >> shift), 0..600)
        ) {
            let ids: Vec<u64> = ids.into_iter().collect();
            let (distinct, coded) = ordered(&ids);
            match coded {
                None => prop_assert_eq!(distinct, (0..ids.len() as u32).collect::<Vec<_>>()),
                Some(coded) => {
                    prop_assert!(coded_bytes(&coded) < ids.len() * KEY_BYTES);
                    prop_assert!(coded.windows(2).all(|pair| pair[0] < pair[1]));
                    let named: Vec<u64> = distinct.iter().map(|d| ids[*d as usize]).collect();
                    prop_assert_eq!(named, coded);
                }
            }
        }
    }
}
