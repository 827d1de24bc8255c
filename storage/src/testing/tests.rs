//! That the simulated disk keeps and loses what a real one may.

use super::{Loss, SimDisk};
use crate::disk::{Disk, write_durably};
use std::path::Path;

fn file(disk: &SimDisk, name: &str) -> std::sync::Arc<dyn crate::disk::DiskFile> {
    disk.create(&Path::new("/d").join(name)).unwrap()
}

#[test]
fn what_is_not_synced_is_lost_and_what_is_stays() {
    let disk = SimDisk::new(1);
    let kept = file(&disk, "kept");
    kept.write_all_at(b"synced", 0).unwrap();
    kept.sync_data().unwrap();
    kept.write_all_at(b"UNSYNCED", 0).unwrap();
    disk.sync_dir(Path::new("/d")).unwrap();
    file(&disk, "lost").sync_data().unwrap();
    disk.power_cycle(Loss::All);
    assert_eq!(disk.contents(Path::new("/d/kept")).unwrap(), b"synced");
    assert_eq!(disk.list(Path::new("/d")).unwrap(), ["kept"]);
    assert!(kept.write_all_at(b"x", 0).is_err(), "the handle is of another life");
}

#[test]
fn a_random_loss_tears_writes_and_is_repeatable() {
    let contents = |seed: u64| {
        let disk = SimDisk::new(seed);
        let file = file(&disk, "f");
        disk.sync_dir(Path::new("/d")).unwrap();
        file.write_all_at(&[7; 5000], 0).unwrap();
        disk.power_cycle(Loss::Random);
        disk.contents(Path::new("/d/f")).unwrap()
    };
    let all: Vec<_> = (0..40).map(contents).collect();
    assert_eq!(all, (0..40).map(contents).collect::<Vec<_>>());
    assert!(all.iter().any(|bytes| bytes.is_empty()));
    assert!(all.iter().any(|bytes| *bytes == [7; 5000]));
    assert!(all.iter().any(|bytes| bytes.contains(&0) && bytes.contains(&7)));
}

#[test]
fn the_power_goes_at_the_number_it_is_told() {
    for cut in 1..=4 {
        let disk = SimDisk::new(1);
        disk.cut_power_at(cut);
        let done = disk.create(Path::new("/d/f")).and_then(|file| {
            file.write_all_at(b"a", 0)?;
            file.sync_data()?;
            disk.sync_dir(Path::new("/d"))
        });
        assert!(done.is_err() && disk.is_off());
        disk.power_cycle(Loss::All);
        assert_eq!(disk.contents(Path::new("/d/f")), None);
    }
}

#[test]
fn a_durably_replaced_file_is_old_or_new() {
    let path = Path::new("/d/f");
    for cut in 1.. {
        for seed in 0..10 {
            let disk = SimDisk::new(seed);
            write_durably(&disk, path, b"old").unwrap();
            disk.cut_power_at(disk.io_count() + cut);
            let result = write_durably(&disk, path, b"new one");
            let is_off = disk.is_off();
            disk.power_cycle(Loss::Random);
            let found = disk.contents(path).unwrap();
            assert!(found == b"new one" || (found == b"old" && result.is_err()), "{found:?}");
            if !is_off {
                return;
            }
        }
    }
}
