//! The power is cut after every single I/O: what was acknowledged is there, and nothing is half there.

use crate::model::{Model, contents, entry, ok, open};
use crate::script::{Run, Step, steps};
use evershard_storage::log::{Driver, Entry, GroupKey};
use evershard_storage::testing::{Loss, SimDisk};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// The model, or models, the log may have come back to: after at least `acknowledged` operations. Each group is judged
/// by itself; its vote, commit position and purge may be younger than its entries (they are copied forward as they are).
fn check(found: &Model, models: &[Model], acknowledged: usize, context: &str) {
    let allowed = &models[acknowledged..];
    let keys: std::collections::BTreeSet<GroupKey> =
        found.keys().chain(allowed.iter().flat_map(|model| model.keys())).copied().collect();
    for key in keys {
        let Some(group) = found.get(&key) else {
            let is_absent = allowed.iter().any(|model| !model.contains_key(&key));
            assert!(is_absent, "{context}: {key} is gone");
            continue;
        };
        let fits = allowed.iter().enumerate().any(|(number, model)| {
            let Some(expected) = model.get(&key) else { return false };
            let later = || allowed[number..].iter().filter_map(|model| model.get(&key));
            let purged = group.purged.map_or(0, |purged| purged.index + 1);
            let mut entries = expected.entries.clone();
            let entries = entries.split_off(&purged);
            // Of an append that was not acknowledged the first entries may be there: each is whole.
            let before = number.checked_sub(1).and_then(|before| allowed[before].get(&key));
            let is_part = before.is_some_and(|before| {
                let is_start = |short: &BTreeMap<u64, Entry>, long: &BTreeMap<u64, Entry>| {
                    short.len() <= long.len() && short.iter().zip(long).all(|(short, long)| short == long)
                };
                is_start(&before.entries, &expected.entries)
                    && is_start(&group.entries, &entries)
                    && group.entries.len() >= before.entries.range(purged..).count()
            });
            (entries == group.entries || is_part)
                && later().any(|later| later.purged == group.purged)
                && later().any(|later| later.vote == group.vote)
                && later().any(|later| later.committed == group.committed)
        });
        assert!(
            fits,
            "{context}: {key} is {group:?}, after {acknowledged} of {}: {:?}",
            models.len() - 1,
            allowed[0].get(&key)
        );
    }
}

/// Plays the steps with the power cut at this I/O; `None` if they end before.
fn play_until_cut(
    steps: &[(u64, Step)],
    cut_at: u64,
    driver: Driver,
) -> Option<(SimDisk, Vec<Model>, usize)> {
    let disk = SimDisk::new(cut_at);
    disk.cut_power_at(cut_at);
    let Some(mut run) = Run::open(&disk, driver, Model::new()) else {
        return Some((disk, vec![Model::new()], 0));
    };
    run.play(steps);
    if !disk.is_off() {
        return None;
    }
    let acknowledged = run.acknowledged.load(Ordering::SeqCst) as usize;
    Some((disk, run.models.clone(), acknowledged))
}

fn losses() -> Vec<(Loss, u64)> {
    let mut losses = vec![(Loss::All, 0), (Loss::Nothing, 0)];
    losses.extend((1..=4).map(|seed| (Loss::Random, seed)));
    losses
}

fn enumerate(seed: u64, length: usize, driver: Driver) -> u64 {
    let steps = steps(seed, length);
    for cut_at in 1.. {
        let Some((disk, models, acknowledged)) = play_until_cut(&steps, cut_at, driver) else {
            return cut_at;
        };
        for (loss, loss_seed) in losses() {
            let context = format!("seed {seed}, power cut at I/O {cut_at}, {loss:?} {loss_seed}");
            let disk = disk.fork(loss_seed * 1000 + cut_at);
            disk.power_cycle(loss);
            let (log, recovery) = open(&disk, Driver::Inline).unwrap();
            assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty(), "{context}: {recovery:?}");
            let found = contents(&log, &recovery);
            check(&found, &models, acknowledged, &context);
            goes_on(&disk, log, &found, &context);
        }
    }
    unreachable!()
}

/// The recovered log can be written, and what it held is not touched by that.
fn goes_on(disk: &SimDisk, log: evershard_storage::log::Log, found: &Model, context: &str) {
    let group = log.group(9, 900).unwrap();
    group.append(vec![entry(0, 1, b"after the crash")], ok());
    drop((log, group));
    disk.power_cycle(Loss::All);
    let (log, recovery) = open(disk, Driver::Inline).unwrap();
    let mut again = contents(&log, &recovery);
    assert!(again.remove(&GroupKey { group: 9, replica: 900 }).is_some(), "{context}");
    assert_eq!(&again, found, "{context}");
    assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty(), "{context}: {recovery:?}");
}

#[test]
fn no_power_cut_loses_what_was_acknowledged() {
    let mut points = 0;
    for seed in 0..4 {
        points += enumerate(seed, 120, Driver::Manual);
    }
    for seed in 10..12 {
        points += enumerate(seed, 60, Driver::Inline);
    }
    assert!(points > 600, "only {points} crash points");
}

#[test]
fn no_power_cut_during_recovery_loses_anything() {
    let steps = steps(21, 120);
    for cut_at in (5..).step_by(7) {
        let Some((crashed, models, acknowledged)) = play_until_cut(&steps, cut_at, Driver::Manual) else {
            assert!(cut_at > 50);
            return;
        };
        for loss_seed in 0..2 {
            crashed.fork(loss_seed).power_cycle(Loss::Random);
            for second_cut in 1.. {
                let context =
                    format!("power cut at I/O {cut_at}, again at {second_cut} of recovery, {loss_seed}");
                let disk = crashed.fork(loss_seed * 77 + second_cut);
                disk.power_cycle(Loss::Random);
                disk.cut_power_at(disk.io_count() + second_cut);
                let opened = open(&disk, Driver::Inline);
                let is_through = opened.is_ok();
                drop(opened);
                disk.power_cycle(Loss::Random);
                let (log, recovery) = open(&disk, Driver::Inline).unwrap();
                assert!(
                    recovery.quarantined.is_empty() && recovery.damage.is_empty(),
                    "{context}: {recovery:?}"
                );
                check(&contents(&log, &recovery), &models, acknowledged, &context);
                if is_through {
                    break;
                }
            }
        }
    }
}

#[test]
fn killing_the_process_loses_nothing_at_all() {
    for seed in 30..40 {
        let steps = steps(seed, 100);
        let disk = SimDisk::new(seed);
        let mut model = Model::new();
        for part in steps.chunks(20) {
            let mut run = Run::open(&disk, Driver::Manual, model).unwrap();
            run.play(part);
            while run.log.pump() {}
            model = run.model().clone();
            drop(run);
            disk.kill_process();
            let (log, recovery) = open(&disk, Driver::Inline).unwrap();
            assert!(
                recovery.quarantined.is_empty() && recovery.damage.is_empty(),
                "seed {seed}: {recovery:?}"
            );
            assert_eq!(contents(&log, &recovery), model, "seed {seed}");
        }
    }
}
