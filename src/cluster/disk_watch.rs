//! The node's disk as it is now: free space against the low-water mark, room in the log, how long it has hung.
//!
//! A thread of its own asks the file system, because on a hung one that call hangs too; what it found last, what the log says of
//! itself, and how long the probe has waited (`disk_probe.rs`), is read without waiting.
//!
//! Not here: what follows from it (`disk_keeper.rs`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use arc_swap::ArcSwap;
use evershard_proto::v1::DiskStatus;
use evershard_storage::disk::FreeSpace;
use evershard_storage::log::{Log, LogRoom};

use super::disk_probe::DiskProbe;
use crate::telemetry::metric_definitions as metric;

/// Between two looks at the file system.
const LOOK: Duration = Duration::from_millis(100);
/// The mark is at most this where nothing is configured.
const LOW_WATER_BYTES: u64 = 256 << 20;
const LOW_WATER_INODES: u64 = 1024;
/// The part of a small disk that is kept.
const PART: u64 = 8;
/// Free space must exceed the mark by this part of it before the disk counts as having room again.
const REGAINED_PART: u64 = 4;

/// Below either of these the disk counts as full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowWater {
    /// Free bytes.
    pub bytes: u64,
    /// Free inodes.
    pub inodes: u64,
}

impl LowWater {
    /// As configured, or (0) what fits the disk: 256 MiB and two log segments, but no more than a part of a small disk.
    #[must_use]
    pub fn of(configured_bytes: u64, segment_bytes: u64, disk: &FreeSpace) -> Self {
        let bytes = match configured_bytes {
            0 => {
                LOW_WATER_BYTES.min(disk.bytes_total / PART).max(2 * segment_bytes).min(disk.bytes_total / 2)
            }
            bytes => bytes,
        };
        LowWater { bytes, inodes: LOW_WATER_INODES.min(disk.inodes_total / PART) }
    }

    /// Whether the disk is below the mark, given whether it was.
    fn is_low(&self, was_low: bool, disk: &FreeSpace) -> bool {
        let least = |mark: u64| if was_low { mark + mark / REGAINED_PART } else { mark };
        disk.bytes < least(self.bytes) || (disk.inodes_total > 0 && disk.inodes < least(self.inodes))
    }
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    free: FreeSpace,
    mark: LowWater,
    is_low: bool,
}

/// The disk at a moment.
#[derive(Debug, Clone, Copy)]
pub struct DiskView {
    /// What was free when the file system last answered.
    pub free: FreeSpace,
    /// The mark.
    pub mark: LowWater,
    /// Less is free than the mark.
    pub is_low: bool,
    /// What room the log has.
    pub room: LogRoom,
    /// How long the log has been waiting for the disk.
    pub log_stalled: Duration,
    /// How long the log or the probe has: whoever waits longer.
    pub stalled: Duration,
    /// That is too long.
    pub is_stalled: bool,
}

/// See the module. Dropping it ends the thread.
pub struct DiskWatch {
    path: PathBuf,
    log: Log,
    probe: DiskProbe,
    stall_limit: Duration,
    seen: Arc<ArcSwap<Seen>>,
    stop: Arc<AtomicBool>,
    thread: Thread,
}

impl DiskWatch {
    /// Looks once, then again and again. Blocks on the disk.
    ///
    /// # Errors
    /// When the file system cannot be asked, or the system has no thread to give.
    pub fn start(
        data: &Path,
        log: Log,
        low_water_bytes: u64,
        segment_bytes: u64,
        stall_limit: Duration,
    ) -> std::io::Result<Self> {
        let look = {
            let data = data.to_owned();
            move |was_low: bool| -> std::io::Result<Seen> {
                let free = FreeSpace::of(&data)?;
                let mark = LowWater::of(low_water_bytes, segment_bytes, &free);
                Ok(Seen { free, mark, is_low: mark.is_low(was_low, &free) })
            }
        };
        let seen = Arc::new(ArcSwap::from_pointee(look(false)?));
        let stop = Arc::new(AtomicBool::new(false));
        let (publish, stopped) = (seen.clone(), stop.clone());
        // Not joined: on a file system that hangs it may never end, and it holds nothing.
        let watching = thread::Builder::new().name("disk-watch".into()).spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                thread::park_timeout(LOOK);
                match look(publish.load().is_low) {
                    Ok(now) => publish.store(Arc::new(now)),
                    Err(error) => tracing::warn!(%error, "the free space of the data directory is not known"),
                }
            }
        })?;
        let thread = watching.thread().clone();
        let log_time = {
            let log = log.clone();
            move || log.disk_time()
        };
        // As often as it takes to notice within two limits, and no more: each question costs the disk something.
        let probe = DiskProbe::start(data.join("replicas").join("disk-probe"), stall_limit, log_time)?;
        Ok(DiskWatch { path: data.to_owned(), log, probe, stall_limit, seen, stop, thread })
    }

    /// The disk now; never waits.
    #[must_use]
    pub fn view(&self) -> DiskView {
        let Seen { free, mark, is_low } = **self.seen.load();
        let log_stalled = self.log.stalled_for();
        let stalled = log_stalled.max(self.probe.stalled_for());
        // Nobody waits for the probe: it takes twice as long to convince.
        let is_stalled = log_stalled >= self.stall_limit || stalled >= 2 * self.stall_limit;
        DiskView { free, mark, is_low, room: self.log.room(), log_stalled, stalled, is_stalled }
    }

    /// For `evershardctl status` and the other nodes.
    #[must_use]
    pub fn status(&self, node: u64) -> DiskStatus {
        let view = self.view();
        DiskStatus {
            path: self.path.display().to_string(),
            free_bytes: view.free.bytes,
            low_water_bytes: view.mark.bytes,
            free_inodes: view.free.inodes,
            low_water_inodes: view.mark.inodes,
            low: view.is_low,
            stalled_ms: u64::try_from(view.stalled.as_millis()).unwrap_or(u64::MAX),
            stalled: view.is_stalled,
            note: self.note(node, &view).unwrap_or_default(),
        }
    }

    /// What is wrong, in words; `None` when nothing is.
    #[must_use]
    pub fn note(&self, node: u64, view: &DiskView) -> Option<String> {
        let path = self.path.display();
        if view.is_stalled {
            let who = if view.log_stalled >= self.stall_limit { "the log" } else { "a probe" };
            return Some(format!(
                "{who} of node {node} in {path} has waited for its disk for {:.1} s",
                view.stalled.as_secs_f64()
            ));
        }
        let DiskView { free, mark, .. } = view;
        let low = view.is_low.then(|| {
            format!(
                "node {node} has {} bytes and {} inodes free in {path}, its low-water mark is {} bytes and {} inodes",
                free.bytes, free.inodes, mark.bytes, mark.inodes
            )
        });
        let log = match view.room {
            LogRoom::Ample => None,
            LogRoom::Reserve { bytes } => {
                Some(format!("the log of node {node} in {path} has {bytes} bytes of its reserve left"))
            }
            LogRoom::Out => {
                Some(format!("the log of node {node} in {path} has used up its reserve, and waits"))
            }
        };
        let notes: Vec<String> = low.into_iter().chain(log).collect();
        (!notes.is_empty()).then(|| notes.join("; "))
    }

    /// Shows it in the metrics.
    pub fn measure(&self, view: &DiskView) {
        let flag = |is: bool| if is { 1.0 } else { 0.0 };
        metrics::gauge!(metric::DISK_FREE_BYTES).set(view.free.bytes as f64);
        metrics::gauge!(metric::DISK_FREE_INODES).set(view.free.inodes as f64);
        metrics::gauge!(metric::DISK_LOW_WATER_BYTES).set(view.mark.bytes as f64);
        metrics::gauge!(metric::DISK_LOW).set(flag(view.is_low));
        metrics::gauge!(metric::LOG_STALLED_SECONDS).set(view.log_stalled.as_secs_f64());
        metrics::gauge!(metric::LOG_STALLED).set(flag(view.log_stalled >= self.stall_limit));
        metrics::gauge!(metric::DISK_STALLED_SECONDS).set(view.stalled.as_secs_f64());
        metrics::gauge!(metric::DISK_STALLED).set(flag(view.is_stalled));
    }
}

impl Drop for DiskWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn disk(bytes: u64, bytes_total: u64) -> FreeSpace {
        FreeSpace { bytes, bytes_total, inodes: 10_000, inodes_total: 100_000 }
    }

    #[test]
    fn the_mark_fits_the_disk() {
        let mark = |configured, segment, total| LowWater::of(configured, segment, &disk(0, total)).bytes;
        assert_eq!(mark(0, 64 * MIB, 1 << 40), 256 * MIB);
        assert_eq!(mark(0, 256 * MIB, 1 << 40), 512 * MIB, "two segments");
        assert_eq!(mark(0, MIB, 240 * MIB), 30 * MIB, "a small disk");
        assert_eq!(mark(0, 64 * MIB, 100 * MIB), 50 * MIB, "no more than half of it");
        assert_eq!(mark(7, 64 * MIB, 1 << 40), 7, "as configured");
    }

    #[test]
    fn a_little_more_than_the_mark_is_not_enough_to_come_back() {
        let mark = LowWater { bytes: 100, inodes: 1000 };
        let at = |was_low, bytes| mark.is_low(was_low, &disk(bytes, 1000));
        assert_eq!([at(false, 99), at(false, 100), at(true, 124), at(true, 125)], [true, false, true, false]);
        let few = FreeSpace { inodes: 999, ..disk(500, 1000) };
        assert!(mark.is_low(false, &few), "inodes count too");
        assert!(
            !mark.is_low(false, &FreeSpace { inodes: 0, inodes_total: 0, ..few }),
            "where they are counted"
        );
    }
}
