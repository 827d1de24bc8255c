//! The log with its own threads, on the real disk.

use crate::model::{contents, entry, ok, options};
use bytes::Bytes;
use evershard_storage::disk::{Disk, RealDisk};
use evershard_storage::log::{Driver, Durability, EntryId, Log, LogOptions, Recovery};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn real(directory: &tempfile::TempDir, durability: Durability) -> LogOptions {
    LogOptions {
        directory: directory.path().join("log"),
        segment_bytes: 64 << 10,
        cache_bytes: 32 << 10,
        durability,
        ..options(&Arc::default())
    }
}

fn open(options: &LogOptions) -> (Log, Recovery) {
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    Log::open(options.clone(), disk, Driver::Threaded).unwrap()
}

#[test]
fn groups_written_by_many_threads_come_back() {
    for durability in [Durability::Fsync, Durability::Memory] {
        let directory = tempfile::tempdir().unwrap();
        let options = real(&directory, durability);
        let (log, recovery) = open(&options);
        assert!(recovery.fresh);
        let acknowledged = Arc::new(AtomicU64::new(0));
        thread::scope(|scope| {
            for number in 1..=4_u64 {
                let (log, acknowledged) = (log.clone(), acknowledged.clone());
                scope.spawn(move || {
                    let group = log.group(number, number).unwrap();
                    for index in 0..100_u64 {
                        let acknowledged = acknowledged.clone();
                        let done = Box::new(move |result: std::io::Result<()>| {
                            result.unwrap();
                            acknowledged.fetch_add(1, Ordering::SeqCst);
                        });
                        group.append(
                            vec![entry(index, number, &vec![index as u8; 1000 + index as usize])],
                            done,
                        );
                        if index % 20 == 19 {
                            assert!(group.wait_durable(index, LONG).unwrap());
                            let id = EntryId { index: index - 10, ..group.entry_id(index - 10).unwrap() };
                            group.purge_through(id, ok());
                            assert_eq!(group.read(index - 5..index + 1, u64::MAX).unwrap().len(), 6);
                        }
                    }
                    assert!(group.wait_durable(99, LONG).unwrap());
                });
            }
        });
        let states: Vec<_> = (1..=4).map(|number| log.group(number, number).unwrap().state()).collect();
        log.close().unwrap();
        assert_eq!(acknowledged.load(Ordering::SeqCst), 400);
        assert!(log.stats().batches > 0);
        drop(log);
        let (log, recovery) = open(&options);
        assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty() && recovery.torn_bytes == 0);
        assert_eq!(recovery.groups.iter().map(|group| group.state).collect::<Vec<_>>(), states);
        assert_eq!(contents(&log, &recovery).values().next().unwrap().entries.len(), 10);
    }
}

#[test]
fn reading_races_with_purging_and_never_sees_anything_else() {
    let directory = tempfile::tempdir().unwrap();
    let options = real(&directory, Durability::Memory);
    let (log, _) = open(&options);
    let group = log.group(1, 10).unwrap();
    let idle = log.group(2, 20).unwrap();
    idle.append((0..20).map(|index| entry(index, 9, &[index as u8; 500])).collect(), ok());
    let end = AtomicU64::new(0);
    thread::scope(|scope| {
        for reader in 0..2 {
            let (group, idle, end) = (group.clone(), idle.clone(), &end);
            scope.spawn(move || {
                while end.load(Ordering::SeqCst) == 0 {
                    let state = group.state();
                    let last = state.last.map_or(0, |last| last.index);
                    let from = if reader == 0 { state.first } else { last.saturating_sub(3) };
                    for read in group.read(from..last + 1, 10_000).unwrap() {
                        assert!(read.payload.iter().all(|&byte| byte == read.index as u8));
                    }
                    assert_eq!(idle.read(5..7, u64::MAX).unwrap().len(), 2);
                }
            });
        }
        for index in 0..2000 {
            group.append(vec![entry(index, 1, &[index as u8; 1500])], ok());
            if index % 16 == 15 {
                assert!(group.wait_durable(index, LONG).unwrap());
                group.purge_through(group.entry_id(index - 10).unwrap(), ok());
            }
        }
        end.store(1, Ordering::SeqCst);
    });
    // Segments go in the background, after syncs that may be slow; that they do go is what is asserted.
    let deadline = Instant::now() + LONG;
    while log.stats().segments >= 10 {
        assert!(Instant::now() < deadline, "{:?}", log.stats());
        thread::sleep(Duration::from_millis(5));
    }
    log.close().unwrap();
    assert!(log.stats().written_bytes > 40 * (64 << 10), "{:?}", log.stats());
}

#[test]
fn the_durable_index_and_admission_can_be_awaited() {
    let directory = tempfile::tempdir().unwrap();
    let options = LogOptions { queue_bytes_max: 10_000, ..real(&directory, Durability::Fsync) };
    let (log, _) = open(&options);
    let group = log.group(1, 10).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut durable = group.durable_changes();
        for index in 0..200 {
            group.admitted().await;
            assert!(log.queued_bytes() <= 10_000 + 4096);
            group.append(vec![entry(index, 1, &[1; 4000])], ok());
        }
        durable.wait_for(|durable| *durable == Some(199)).await.unwrap();
    });
    log.close().unwrap();
}

#[test]
fn dropping_the_log_answers_everybody() {
    let directory = tempfile::tempdir().unwrap();
    let options = real(&directory, Durability::Fsync);
    let (log, _) = open(&options);
    let group = log.group(1, 10).unwrap();
    let answered = Arc::new(AtomicU64::new(0));
    for index in 0..50 {
        let answered = answered.clone();
        group.append(
            vec![entry(index, 1, &[1; 4000])],
            Box::new(move |_| {
                answered.fetch_add(1, Ordering::SeqCst);
            }),
        );
    }
    drop(log);
    assert_eq!(answered.load(Ordering::SeqCst), 50);
    assert!(group.wait_durable(1000, LONG).is_err());
    // The directory is free again.
    let (log, recovery) = open(&options);
    assert!(recovery.quarantined.is_empty());
    assert_eq!(log.stalled_for(), Duration::ZERO);
}

#[test]
fn commit_positions_ride_along() {
    let directory = tempfile::tempdir().unwrap();
    let options = real(&directory, Durability::Fsync);
    let (log, _) = open(&options);
    let group = log.group(1, 10).unwrap();
    let begun = Instant::now();
    for index in 0..50_u64 {
        group.append(vec![entry(index, 1, b"x")], ok());
        assert!(group.wait_durable(index, LONG).unwrap());
        group.save_committed(Bytes::from(index.to_le_bytes().to_vec()));
    }
    // One batch for each append, one for the creation, and one a second that nobody waits for.
    assert!(log.stats().batches <= 51 + 2 + begun.elapsed().as_secs(), "{:?}", log.stats());
    log.close().unwrap();
    drop((log, group));
    let (_, recovery) = open(&options);
    assert_eq!(recovery.groups[0].committed.as_ref().unwrap()[..], 49_u64.to_le_bytes());
}
