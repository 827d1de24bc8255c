//! Rows that leave memory and come back.

use super::*;

/// A table of flushed rows, `rows` of them.
fn clean_table(shape: RowShape, rows: u64) -> Table {
    let mut table = Table::new(shape);
    for key in 0..rows {
        let slot = table.insert(key);
        table.row_mut(slot).weights_mut().fill(key as f32);
    }
    table.begin_flush();
    table.commit_flush();
    table
}

#[test]
fn rows_in_use_outlast_rows_read_once() {
    let mut table = clean_table(SHAPE, 100);
    assert_eq!(table.evict(0, u32::MAX, |_, _, _| {}), 0);
    let hot: Vec<u64> = (0..100).step_by(10).collect();
    for _ in 0..5 {
        table.visit(&hot, |_, row| assert!(row.is_some()));
    }
    let mut left = Vec::new();
    for _ in 0..2 {
        table.evict(u32::MAX, u32::MAX, |_, key, _| left.push(key));
    }
    assert_eq!(left.len(), 90);
    assert!(hot.iter().all(|key| !left.contains(key)));
    // Unused, they leave in turn.
    for _ in 0..2 {
        table.evict(u32::MAX, u32::MAX, |_, _, _| {});
    }
    assert_eq!((table.resident(), table.free_slots(), table.is_whole()), (0, 100, false));
}

#[test]
fn dirty_rows_never_leave() {
    let mut table = clean_table(SHAPE, 10);
    let slot = table.find_slot(3).unwrap();
    table.row_mut(slot).header_mut().version = 1;
    assert_eq!(table.evict(u32::MAX, u32::MAX, |_, _, _| {}), 9);
    table.begin_flush();
    assert_eq!(table.evict(u32::MAX, u32::MAX, |_, _, _| {}), 0, "owed by the flush");
    table.abort_flush();
    assert_eq!(table.evict(u32::MAX, u32::MAX, |_, _, _| {}), 0);
    assert!(table.find(3).is_some());
}

#[test]
fn a_row_read_before_its_key_left_is_not_taken_in() {
    let mut table = clean_table(SHAPE, 1);
    table.evict(1, u32::MAX, |_, _, _| {});
    let seen = table.departures(0);
    // Meanwhile it comes in, changes, is flushed and leaves again.
    assert!(table.load_absent(0, seen, RowHeader::default(), &[0.0; 5]));
    let slot = table.find_slot(0).unwrap();
    table.row_mut(slot).weights_mut().fill(9.0);
    table.begin_flush();
    table.commit_flush();
    assert!(!table.load_absent(0, seen, RowHeader::default(), &[0.0; 5]), "it is there");
    table.evict(1, u32::MAX, |_, _, _| {});
    assert!(!table.load_absent(0, seen, RowHeader::default(), &[0.0; 5]), "what was read is old");
    assert!(table.load_absent(0, table.departures(0), RowHeader::default(), &[9.0; 5]));
}

#[cfg(not(miri))]
#[test]
fn memory_is_given_back_a_piece_at_a_time() {
    let shape = RowShape::plain(1000, 0);
    let mut table = clean_table(shape, 3 * 4096);
    let piece = u64::from(table.slots_per_piece());
    assert!(piece * 2 < 3 * 4096, "several pieces");
    let before = table.memory_bytes();
    // A dirty row keeps its piece.
    let last = table.find_slot(3 * 4096 - 1).unwrap();
    table.row_mut(last).header_mut().version = 1;
    assert!(!table.give_back(u32::MAX, |_, _, _| {}));
    assert!(table.find(3 * 4096 - 1).is_some());
    table.begin_flush();
    table.commit_flush();
    assert!(table.give_back(u32::MAX, |_, _, _| {}));
    assert!(table.memory_bytes() < before);
    // What is left is as it was, and there is room for new rows.
    assert_eq!(table.find(7).unwrap().weights()[0], 7.0);
    for key in 1_000_000..1_010_000 {
        let slot = table.insert(key);
        assert!(table.row(slot).weights().iter().all(|weight| *weight == 0.0));
    }
    assert_eq!(table.find(7).unwrap().weights()[999], 7.0);
    while table.give_back(u32::MAX, |_, _, _| {}) {}
    assert_eq!(table.find(1_000_001).unwrap().weights(), [0.0; 1000], "dirty rows stay");
}
