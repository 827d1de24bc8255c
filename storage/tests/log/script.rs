//! Random but repeatable operations on a log, with the model after each of them.

use crate::model::{DIRECTORY, Model, ModelGroup, count, entry, open_with, options};
use bytes::Bytes;
use evershard_storage::log::{Driver, EntryId, GroupKey, GroupLog, Log, LogOptions};
use evershard_storage::testing::SimDisk;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One operation on one group.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Append { sizes: Vec<usize>, term: u64 },
    Vote(u64),
    Committed(u64),
    Truncate { back: u64 },
    Purge { keep: u64 },
    PurgeBeyond { by: u64 },
    Destroy,
    Pump,
    Housekeep,
}

/// Steps for a few groups.
pub(crate) fn steps(seed: u64, count: usize) -> Vec<(u64, Step)> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut steps = Vec::new();
    for number in 0..count {
        let group = random.random_range(1..=3);
        let step = match random.random_range(0..100) {
            0..40 => {
                let entries = random.random_range(1..4);
                let sizes = (0..entries).map(|_| random.random_range(0..300)).collect();
                Step::Append { sizes, term: 1 + number as u64 / 10 }
            }
            40..48 => Step::Vote(number as u64),
            48..54 => Step::Committed(number as u64),
            54..60 => Step::Truncate { back: random.random_range(1..4) },
            60..70 => Step::Purge { keep: random.random_range(0..5) },
            70..72 => Step::PurgeBeyond { by: random.random_range(1..10) },
            72..73 => Step::Destroy,
            73..94 => Step::Pump,
            _ => Step::Housekeep,
        };
        steps.push((group, step));
    }
    steps.push((1, Step::Pump));
    steps
}

/// A run of steps, and what is known about it.
pub(crate) struct Run {
    pub(crate) log: Log,
    /// The model after each operation; the first is the model before.
    pub(crate) models: Vec<Model>,
    /// Operations acknowledged; they are acknowledged in order.
    pub(crate) acknowledged: Arc<AtomicU64>,
    pub(crate) fatal: Arc<AtomicU64>,
    handles: BTreeMap<u64, GroupLog>,
    replicas: BTreeMap<u64, u64>,
    driver: Driver,
}

impl Run {
    pub(crate) fn open(disk: &SimDisk, driver: Driver, model: Model) -> Option<Run> {
        Run::open_with(|_| (), disk, driver, model)
    }

    pub(crate) fn open_with(
        change: impl FnOnce(&mut LogOptions),
        disk: &SimDisk,
        driver: Driver,
        model: Model,
    ) -> Option<Run> {
        let fatal = Arc::new(AtomicU64::new(0));
        let mut options = options(&fatal);
        change(&mut options);
        assert_eq!(options.directory.to_str(), Some(DIRECTORY));
        let (log, _) = open_with(options, disk, driver).ok()?;
        let mut replicas = BTreeMap::new();
        for key in model.keys() {
            replicas.insert(key.group, key.replica);
        }
        let acknowledged = Arc::new(AtomicU64::new(0));
        Some(Run {
            log,
            models: vec![model],
            acknowledged,
            fatal,
            handles: BTreeMap::new(),
            replicas,
            driver,
        })
    }

    pub(crate) fn model(&self) -> &Model {
        self.models.last().unwrap()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.fatal.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn play(&mut self, steps: &[(u64, Step)]) {
        for (group, step) in steps {
            if self.has_failed() {
                return;
            }
            self.step(*group, step);
        }
    }

    fn handle(&mut self, group: u64) -> Option<(GroupKey, GroupLog)> {
        let replica = *self.replicas.entry(group).or_insert(group * 100);
        let key = GroupKey { group, replica };
        if let Some(handle) = self.handles.get(&group) {
            return Some((key, handle.clone()));
        }
        let handle = self.log.group(group, replica).ok()?;
        self.handles.insert(group, handle.clone());
        if !self.model().contains_key(&key) {
            // Creating is an operation of its own; nobody is told when it is durable.
            let mut next = self.model().clone();
            next.insert(key, ModelGroup::default());
            self.models.push(next);
            self.acknowledged_by(&handle);
        }
        Some((key, handle))
    }

    /// The creation has no callback: count it with one of a harmless operation, which is one more step.
    fn acknowledged_by(&mut self, handle: &GroupLog) {
        self.models.push(self.model().clone());
        let acknowledged = self.acknowledged.clone();
        handle.truncate_from(
            u64::MAX,
            Box::new(move |result| {
                if result.is_ok() {
                    acknowledged.fetch_add(2, Ordering::SeqCst);
                }
            }),
        );
    }

    fn step(&mut self, group: u64, step: &Step) {
        match step {
            Step::Pump => {
                if self.driver == Driver::Manual {
                    self.log.pump();
                }
                return;
            }
            Step::Housekeep => {
                if self.driver == Driver::Manual {
                    self.log.housekeep();
                }
                return;
            }
            _ => {}
        }
        let Some((key, handle)) = self.handle(group) else { return };
        let mut model = self.model().clone();
        let state = model.get_mut(&key).unwrap();
        let done = count(&self.acknowledged);
        match step {
            Step::Append { sizes, term } => {
                let first = state.next();
                let byte = |index: u64| (index * 7 + term) as u8;
                let entries: Vec<_> = (first..)
                    .zip(sizes)
                    .map(|(index, &size)| entry(index, *term, &vec![byte(index); size]))
                    .collect();
                state.entries.extend(entries.iter().map(|entry| (entry.index, entry.clone())));
                self.models.push(model);
                handle.append(entries.clone(), done);
                if !self.has_failed() {
                    assert_eq!(handle.read(first..first + sizes.len() as u64, u64::MAX).unwrap(), entries);
                }
            }
            Step::Vote(vote) => {
                state.vote = Some(Bytes::from(vote.to_le_bytes().to_vec()));
                let vote = state.vote.clone().unwrap();
                self.models.push(model);
                handle.save_vote(vote, done);
            }
            Step::Committed(committed) => {
                state.committed = Some(Bytes::from(format!("committed {committed}")));
                let committed = state.committed.clone().unwrap();
                self.models.push(model.clone());
                handle.save_committed(committed);
                self.models.push(model);
                let acknowledged = self.acknowledged.clone();
                handle.truncate_from(
                    u64::MAX,
                    Box::new(move |result| {
                        if result.is_ok() {
                            acknowledged.fetch_add(2, Ordering::SeqCst);
                        }
                    }),
                );
            }
            Step::Truncate { back } => {
                let first = state.purged.map_or(0, |purged| purged.index + 1);
                let from = state.next().saturating_sub(*back).max(first);
                state.entries.split_off(&from);
                self.models.push(model);
                handle.truncate_from(from, done);
            }
            Step::Purge { keep } => {
                let Some(index) = state.next().checked_sub(1 + keep) else { return };
                let Some(last) = state.entries.get(&index) else { return };
                let id = last.id();
                state.entries = state.entries.split_off(&(index + 1));
                state.purged = Some(id);
                self.models.push(model);
                handle.purge_through(id, done);
            }
            Step::PurgeBeyond { by } => {
                let id = EntryId { index: state.next() + by, term: 50, leader: 1 };
                state.entries.clear();
                state.purged = Some(id);
                self.models.push(model);
                handle.purge_through(id, done);
            }
            Step::Destroy => {
                model.remove(&key);
                self.models.push(model);
                handle.destroy(done);
                self.handles.remove(&group);
                *self.replicas.get_mut(&group).unwrap() += 1;
            }
            Step::Pump | Step::Housekeep => unreachable!(),
        }
    }
}
