//! The table against a model: a map of rows, a map of what is on disk, two sets of dirty keys.

use std::collections::{BTreeMap, HashMap, HashSet};

use proptest::prelude::*;

use super::*;

mod residency;

const SHAPE: RowShape = RowShape { dim: 3, state: 2, notes: 1 };

type Content = (RowHeader, Vec<f32>);

/// What a test does to a table.
#[derive(Debug, Clone)]
enum Step {
    Insert(u64),
    Change(u64),
    Remove(u64),
    Revive(u64),
    /// The record only counts from here on.
    Count(u64),
    RemoveEntry(u64),
    Load(u64),
    BeginFlush,
    /// Copies some of the rows that the running flush owes.
    CopySome(usize),
    CommitFlush,
    AbortFlush,
    /// Rows to let go of, slots to look at.
    Evict(u32, u32),
    GiveBack,
    /// A row is read from disk; it may be taken in later.
    ReadAbsent(u64),
    TakeIn,
}

fn keys() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..24_u64).prop_map(|low| 0xabcd_0000_0000_0000 | low),
        2 => (0..8_u64).prop_map(|high| high << 61 | 7),
        1 => Just(0),
        1 => Just(u64::MAX),
        1 => any::<u64>(),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => keys().prop_map(Step::Insert),
        8 => keys().prop_map(Step::Change),
        3 => keys().prop_map(Step::Remove),
        1 => keys().prop_map(Step::Revive),
        2 => keys().prop_map(Step::Count),
        3 => keys().prop_map(Step::RemoveEntry),
        3 => keys().prop_map(Step::Load),
        2 => Just(Step::BeginFlush),
        4 => (1..20_usize).prop_map(Step::CopySome),
        2 => Just(Step::CommitFlush),
        1 => Just(Step::AbortFlush),
        4 => (1..8_u32, 1..30_u32).prop_map(|(rows, slots)| Step::Evict(rows, slots)),
        1 => Just(Step::GiveBack),
        4 => keys().prop_map(Step::ReadAbsent),
        4 => Just(Step::TakeIn),
    ];
    prop::collection::vec(step, 0..if cfg!(miri) { 60 } else { 400 })
}

struct World {
    table: Table,
    rows: HashMap<u64, Content>,
    /// What committed flushes and loads have put on disk.
    disk: HashMap<u64, Content>,
    current: HashSet<u64>,
    flushing: HashSet<u64>,
    /// Rows that the running flush owes, still to be copied.
    owed: Vec<DirtyRow>,
    /// Rows that it has copied.
    copied: BTreeMap<u64, Content>,
    clock: u64,
    /// Read from disk while their keys were absent.
    read: Vec<(u64, Departures, Content)>,
    live_changes: i64,
}

impl World {
    fn new() -> Self {
        Self {
            table: Table::new(SHAPE),
            rows: HashMap::new(),
            disk: HashMap::new(),
            current: HashSet::new(),
            flushing: HashSet::new(),
            owed: Vec::new(),
            copied: BTreeMap::new(),
            clock: 0,
            read: Vec::new(),
            live_changes: 0,
        }
    }

    fn change(&mut self, key: u64, change: impl FnOnce(&mut RowMut<'_>)) {
        let Some(slot) = self.table.find_slot(key) else {
            assert!(!self.rows.contains_key(&key));
            return;
        };
        let mut row = self.table.row_mut(slot);
        change(&mut row);
        let content = (row.header(), row.floats_mut().to_vec());
        drop(row);
        let is_live = i64::from(content.0.is_live());
        let was = self.rows.insert(key, content);
        self.live_changes += is_live - was.map_or(0, |(header, _)| i64::from(header.is_live()));
        self.current.insert(key);
    }

    fn step(&mut self, step: Step) {
        self.clock += 1;
        let now = self.clock;
        match step {
            Step::Insert(key) => {
                let slot = self.table.insert(key);
                self.current.insert(key);
                let fresh = (RowHeader::default(), vec![0.0; SHAPE.floats()]);
                self.live_changes += i64::from(!self.rows.contains_key(&key));
                let expected = self.rows.entry(key).or_insert(fresh);
                assert_eq!(bits(&content(&self.table.row(slot))), bits(expected));
            }
            Step::Change(key) => self.change(key, |row| {
                *row.header_mut() = RowHeader { version: now, steps: now as u32, flags: row.header().flags };
                row.weights_mut().fill(now as f32);
                row.state_mut().fill(-(now as f32));
                row.notes_mut().fill(f32::from_bits(now as u32));
                if row.header().is_counting() {
                    row.floats_mut()[..SHAPE.notes_at()].fill(0.0);
                }
            }),
            Step::Count(key) => self.change(key, |row| {
                *row.header_mut() = RowHeader { version: now, steps: 2, flags: RowHeader::COUNTING };
                row.floats_mut().fill(0.0);
                // A signalling NaN's bits: notes are kept as they are.
                row.notes_mut().fill(f32::from_bits(0x7f80_0000 | now as u32));
            }),
            Step::Remove(key) => self.change(key, |row| {
                *row.header_mut() = RowHeader { version: now, steps: 0, flags: RowHeader::TOMBSTONE };
                row.floats_mut().fill(0.0);
            }),
            Step::Revive(key) => self.change(key, |row| {
                let (header, weights, _) = row.split_mut();
                *header = RowHeader { version: now, steps: 1, flags: 0 };
                weights.fill(now as f32);
            }),
            Step::RemoveEntry(key) => {
                let clean = !self.current.contains(&key) && !self.flushing.contains(&key);
                let expected = clean && self.rows.get(&key).is_some_and(|(header, _)| header.is_tombstone());
                assert_eq!(self.table.remove_entry(key), expected);
                if expected {
                    self.rows.remove(&key);
                    self.disk.remove(&key);
                }
            }
            Step::Load(key) => {
                let flags = [RowHeader::TOMBSTONE, RowHeader::COUNTING, 0, 0][now as usize % 4];
                let header = RowHeader { version: now, steps: 9, flags };
                let floats = vec![0.5; SHAPE.stored_floats(header)];
                let expected = !self.rows.contains_key(&key);
                assert_eq!(self.table.load(key, header, &floats), expected);
                if expected {
                    let content = (header, in_memory(header, &floats));
                    self.rows.insert(key, content.clone());
                    self.disk.insert(key, content);
                }
            }
            Step::BeginFlush => {
                self.current.extend(self.flushing.drain());
                assert_eq!(self.table.begin_flush(), self.current.len() as u64);
                self.flushing = std::mem::take(&mut self.current);
                let (mut cursor, mut owed) = (FlushCursor::default(), Vec::new());
                while !cursor.is_done() {
                    self.table.flush_keys(&mut cursor, 64, &mut owed);
                }
                owed.sort_unstable();
                let mut expected: Vec<u64> = self.flushing.iter().copied().collect();
                expected.sort_unstable();
                assert_eq!(owed.iter().map(|row| row.key).collect::<Vec<_>>(), expected);
                owed.reverse();
                self.owed = owed;
                self.copied.clear();
            }
            Step::CopySome(count) => {
                let batch: Vec<DirtyRow> =
                    (0..count.min(self.owed.len())).filter_map(|_| self.owed.pop()).collect();
                let mut seen = Vec::new();
                self.table.flush_rows(&batch, |key, header, floats| {
                    seen.push(key);
                    assert_eq!(
                        floats.len(),
                        if header.is_tombstone() { SHAPE.floats() } else { SHAPE.stored_floats(header) }
                    );
                    self.copied.insert(key, (header, in_memory(header, floats)));
                });
                let expected: Vec<u64> =
                    batch.iter().map(|row| row.key).filter(|key| self.flushing.contains(key)).collect();
                assert_eq!(seen, expected);
                for key in seen {
                    assert_eq!(bits(&self.copied[&key]), bits(&self.rows[&key]));
                    self.current.remove(&key);
                }
            }
            Step::CommitFlush => {
                self.step(Step::CopySome(usize::MAX));
                self.table.commit_flush();
                self.flushing.clear();
                self.disk.extend(std::mem::take(&mut self.copied));
            }
            Step::AbortFlush => {
                self.table.abort_flush();
                self.current.extend(self.flushing.drain());
                self.owed.clear();
                self.copied.clear();
            }
            Step::Evict(rows, slots) => {
                let mut left = Vec::new();
                let evicted = self.table.evict(rows, slots, |_, key, row| left.push((key, content(&row))));
                assert_eq!(evicted as usize, left.len());
                assert!(evicted <= rows);
                self.leave(left);
            }
            Step::GiveBack => {
                let mut left = Vec::new();
                self.table.give_back(u32::MAX, |_, key, row| left.push((key, content(&row))));
                self.leave(left);
            }
            Step::ReadAbsent(key) => {
                // What the disk has is the row's content only when nothing of it is in memory.
                if !self.rows.contains_key(&key)
                    && let Some(content) = self.disk.get(&key)
                {
                    self.read.push((key, self.table.departures(key), content.clone()));
                }
            }
            Step::TakeIn => {
                if let Some((key, seen, content)) = self.read.pop()
                    && self.table.load_absent(key, seen, content.0, on_disk(&content))
                {
                    assert_eq!(
                        self.disk.get(&key).map(bits),
                        Some(bits(&content)),
                        "an old row was taken in"
                    );
                    self.rows.insert(key, content);
                }
            }
        }
    }

    /// Rows left memory: the disk has them as they were.
    fn leave(&mut self, left: Vec<(u64, Content)>) {
        for (key, content) in left {
            assert!(!self.current.contains(&key) && !self.flushing.contains(&key), "it was dirty");
            assert_eq!(self.disk.get(&key).map(bits), Some(bits(&content)));
            assert!(content.0.is_tombstone() || !self.table.is_whole());
            assert_eq!(self.rows.remove(&key).as_ref().map(bits), Some(bits(&content)));
        }
    }

    fn check(&self) {
        let tombstones = self.rows.values().filter(|(header, _)| header.is_tombstone()).count() as u64;
        assert_eq!(self.table.tombstones(), tombstones);
        let counting = self.rows.values().filter(|(header, _)| header.is_counting()).count() as u64;
        assert_eq!(self.table.counting(), counting);
        assert_eq!(self.table.len(), self.rows.len() as u64 - tombstones - counting);
        assert_eq!(self.table.live_changes(), self.live_changes);
        assert_eq!(self.table.resident(), self.rows.len() as u64);
        let (mut unflushed, mut expected) = (self.table.unflushed(), HashSet::new());
        for key in self.current.union(&self.flushing) {
            expected.insert(self.table.find_slot(*key).unwrap().number());
        }
        assert_eq!(unflushed.take_some(0, usize::MAX).0.into_iter().collect::<HashSet<_>>(), expected);
        assert_eq!(self.table.dirty_rows(), self.current.len() as u64);
        assert_eq!(self.table.flushing_rows(), self.flushing.len() as u64);
        for (key, expected) in &self.rows {
            assert_eq!(bits(&content(&self.table.find(*key).unwrap())), bits(expected));
            if !self.current.contains(key) && !self.flushing.contains(key) {
                assert_eq!(
                    self.disk.get(key).map(bits),
                    Some(bits(expected)),
                    "a clean row is on disk as it is"
                );
            }
        }
        let scanned: HashMap<u64, Content> = (0..self.table.slots())
            .filter_map(|number| self.table.row_at(number).map(|(key, row)| (key, content(&row))))
            .collect();
        let all = |rows: &HashMap<u64, Content>| -> BTreeMap<u64, _> {
            rows.iter().map(|(key, row)| (*key, bits(row))).collect()
        };
        assert_eq!(all(&scanned), all(&self.rows));
        assert!(self.table.row_at(self.table.slots()).is_none());
        batches_equal_singles(&self.table, &[1, 0, u64::MAX, 0xabcd_0000_0000_0001, 1]);
    }
}

fn content(row: &RowRef<'_>) -> Content {
    assert_eq!((row.weights().len(), row.state().len()), (3, 2));
    assert_eq!(row.notes().len(), 1);
    (row.header(), row.floats().to_vec())
}

/// To compare NaNs as well.
fn bits(content: &Content) -> (RowHeader, Vec<u32>) {
    (content.0, content.1.iter().map(|float| float.to_bits()).collect())
}

/// What is in memory of what is stored.
fn in_memory(header: RowHeader, stored: &[f32]) -> Vec<f32> {
    let first = if header.is_counting() { SHAPE.notes_at() } else { 0 };
    let mut floats = vec![0.0; SHAPE.floats()];
    floats[first..first + stored.len()].copy_from_slice(stored);
    floats
}

fn on_disk(content: &Content) -> &[f32] {
    if content.0.is_counting() { &content.1[SHAPE.notes_at()..] } else { &content.1 }
}

fn batches_equal_singles(table: &Table, keys: &[u64]) {
    let mut slots = vec![None; 3];
    table.find_batch(keys, &mut slots);
    let singles: Vec<Option<Slot>> = keys.iter().map(|&key| table.find_slot(key)).collect();
    assert_eq!(slots, singles);
    let mut visited = 0;
    table.visit(keys, |position, row| {
        assert_eq!(position, visited);
        let single = table.find(keys[position]);
        assert_eq!(row.map(|row| row.header()), single.map(|row| row.header()));
        visited += 1;
    });
    assert_eq!(visited, keys.len());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 300 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_table_is_its_model(steps in steps()) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.check();
        // Whatever happened, one whole flush brings the disk to what memory has.
        world.step(Step::BeginFlush);
        world.step(Step::CommitFlush);
        world.check();
        for (key, content) in &world.rows {
            prop_assert_eq!(world.disk.get(key).map(bits), Some(bits(content)));
        }
    }
}

/// Keys that share what a bad index would look at.
fn awkward_keys(count: u64) -> Vec<u64> {
    let quarter = count / 4;
    let mut keys: Vec<u64> = (0..quarter)
        .flat_map(|number| [number, number << 32 | 5, number << 48 ^ number, u64::MAX - number])
        .collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

#[test]
fn growing_keeps_every_key_and_removing_frees_slots_for_reuse() {
    let keys = awkward_keys(if cfg!(miri) { 400 } else { 300_000 });
    let mut table = Table::new(RowShape::plain(1, 0));
    for (number, &key) in keys.iter().enumerate() {
        let slot = table.insert(key);
        assert_eq!(slot.number() as usize, number);
        table.row_mut(slot).weights_mut()[0] = number as f32;
    }
    assert_eq!(table.len(), keys.len() as u64);
    batches_equal_singles(&table, &keys);
    let absent: Vec<u64> = keys.iter().map(|key| key ^ 0x0000_7000_0000_0000).collect();
    batches_equal_singles(&table, &absent);

    for &key in keys.iter().step_by(2) {
        let slot = table.find_slot(key).unwrap();
        table.row_mut(slot).header_mut().flags = RowHeader::TOMBSTONE;
        assert!(!table.remove_entry(key), "dirty");
    }
    table.begin_flush();
    assert!(!table.remove_entry(keys[0]), "owed");
    table.commit_flush();
    let used = table.slots();
    for &key in keys.iter().step_by(2) {
        assert!(table.remove_entry(key));
        assert!(table.find(key).is_none());
    }
    assert_eq!(table.tombstones(), 0);
    batches_equal_singles(&table, &keys);
    for (number, &key) in keys.iter().enumerate().skip(1).step_by(2) {
        assert_eq!(table.find(key).unwrap().weights(), [number as f32]);
    }
    for &key in keys.iter().step_by(2) {
        let slot = table.insert(key);
        assert_eq!(table.row(slot).weights(), [0.0]);
    }
    assert_eq!(table.slots(), used, "freed slots are used again");
    assert_eq!(table.len(), keys.len() as u64);
}

#[test]
fn rows_of_every_shape_keep_their_floats_apart() {
    for floats in [0, 1, 2, 3, 15, 16, 64, 129, 5000] {
        let shape = RowShape::plain(floats / 2, floats - floats / 2);
        let mut table = Table::new(shape);
        for key in 0..40 {
            let slot = table.insert(key);
            let mut row = table.row_mut(slot);
            row.header_mut().version = key;
            row.weights_mut().fill(key as f32);
            row.state_mut().fill(-(key as f32));
        }
        for key in 0..40 {
            let row = table.find(key).unwrap();
            assert_eq!(row.header().version, key);
            assert!(row.weights().iter().all(|weight| *weight == key as f32));
            assert!(row.state().iter().all(|state| *state == -(key as f32)));
            assert_eq!((row.weights().len(), row.state().len()), (shape.dim as usize, shape.state as usize));
        }
    }
}

#[test]
fn a_row_changed_after_its_copy_stays_dirty_and_a_failed_flush_gives_all_back() {
    let mut table = Table::new(SHAPE);
    let slots: Vec<Slot> = (0..3).map(|key| table.insert(key)).collect();
    assert_eq!((table.dirty_rows(), table.begin_flush(), table.dirty_rows()), (3, 3, 0));
    table.row_mut(slots[0]).header_mut().version = 7;
    let owed: Vec<DirtyRow> = (0..3).map(|key| DirtyRow { key, slot: slots[key as usize] }).collect();
    let mut versions = Vec::new();
    table.flush_rows(&owed, |_, header, _| versions.push(header.version));
    assert_eq!(versions, [7, 0, 0]);
    assert_eq!(table.dirty_rows(), 0, "the copy has the change");
    table.row_mut(slots[1]).header_mut().version = 8;
    table.commit_flush();
    assert_eq!((table.dirty_rows(), table.flushing_rows()), (1, 0));

    table.row_mut(slots[2]).header_mut().version = 9;
    assert_eq!(table.begin_flush(), 2);
    table.flush_rows(&owed[1..], |_, _, _| {});
    table.abort_flush();
    assert_eq!(table.dirty_rows(), 2);
    assert_eq!(table.begin_flush(), 2);
    assert_eq!(table.begin_flush(), 2, "a flush that never ended has failed");
}

#[cfg(not(miri))]
#[test]
fn a_row_costs_at_most_32_bytes_beside_its_floats() {
    for (dim, state) in [(16, 16), (64, 64), (9, 0)] {
        let shape = RowShape::plain(dim, state);
        let mut table = Table::new(shape);
        let mut key = 0_u64;
        let (mut worst, mut sum, mut count) = (0.0_f64, 0.0, 0.0);
        for rows in (25_000..=400_000).step_by(1000) {
            while table.len() < rows {
                key = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
                table.insert(key);
            }
            let floats = rows as usize * shape.floats() * 4;
            let overhead = (table.memory_bytes() - floats) as f64 / rows as f64;
            worst = worst.max(overhead);
            (sum, count) = (sum + overhead, count + 1.0);
        }
        println!("{shape:?}: at most {worst:.1} bytes, {:.1} in the mean", sum / count);
        assert!(worst <= 32.0, "{shape:?}: {worst}");
    }
}

/// Rows come and go at the bound of a budget: what is free is room for others, not what a row costs.
#[cfg(not(miri))]
#[test]
fn a_row_costs_no_more_when_others_have_left() {
    const RESIDENT: u64 = 40_000;
    let shape = RowShape::plain(16, 16);
    let mut table = Table::new(shape);
    let mut key = 0_u64;
    for _ in 0..40 {
        for _ in 0..RESIDENT / 10 {
            key = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
            table.load(key, RowHeader { version: 1, ..RowHeader::default() }, &[1.0; 32]);
        }
        let beyond = table.resident().saturating_sub(RESIDENT);
        // Fits: a tenth of a small table.
        table.evict(beyond as u32, u32::MAX, |_, _, _| {});
    }
    assert_eq!(table.resident(), RESIDENT);
    let free = table.free_slots() as usize;
    assert_eq!(free as u64, RESIDENT / 10);
    assert!((table.free_bytes() - free * table.arena.row_bytes()) < free * 16, "rows, and a list of them");
    let floats = RESIDENT as usize * shape.floats() * 4;
    let overhead = (table.memory_bytes() - table.free_bytes() - floats) as f64 / RESIDENT as f64;
    assert!(overhead <= 32.0, "{overhead}");
}

#[test]
fn slots_of_another_table_do_not_reach_memory() {
    let mut large = Table::new(SHAPE);
    let slots: Vec<Slot> = (0..10).map(|key| large.insert(key)).collect();
    let slot = slots[9];
    let mut small = Table::new(SHAPE);
    small.insert(1);
    assert!(std::panic::catch_unwind(|| small.row(slot).header().version).is_err());
}
