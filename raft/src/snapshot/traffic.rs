//! What a node sends and receives of snapshots, over all its groups: how fast it may, and how much it has.
//!
//! Invariants:
//! - the rate is the node's, however many receivers there are; chunks take their turns in the order they asked;
//! - while the node's log takes in pushes a lower rate holds, for transfers that are not late: a snapshot may take its time, a
//!   training step may not;
//! - a few transfers go on at once, and the others wait: memory does not grow with the number of groups.
//!
//! Not here: names of metrics (the server), progress of one transfer (`stream`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use openraft::Instant as _;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::options::RaftLimits;
use crate::type_config::{Runtime, Tokio};

/// Transfers of a node under way at once; each holds a few chunks in memory. Whoever installs does not count.
const TRANSFERS_MAX: usize = 4;

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Total(AtomicU64);

impl Total {
    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(crate) struct SnapshotCounters {
    pub(crate) sent: Total,
    pub(crate) failed: Total,
    pub(crate) resumed: Total,
    pub(crate) received: Total,
    pub(crate) bytes_sent: Total,
    pub(crate) bytes_skipped: Total,
    pub(crate) bytes_received: Total,
    pub(crate) chunks_repeated: Total,
}

/// Figures of a node's snapshots since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotFigures {
    /// Sent whole and installed.
    pub sent: u64,
    /// Attempts to send that broke off.
    pub failed: u64,
    /// Attempts that went on with what an earlier one had sent.
    pub resumed: u64,
    /// Received whole and installed.
    pub received: u64,
    /// Bytes of files sent a second, of late; 0 when nothing is.
    pub bytes_per_second: u64,
    /// Bytes of files sent, those sent again included.
    pub bytes_sent: u64,
    /// Bytes of files not sent, because the receiver had them.
    pub bytes_skipped: u64,
    /// Bytes of files received.
    pub bytes_received: u64,
    /// Chunks sent again because they arrived damaged.
    pub chunks_repeated: u64,
}

/// See the module.
pub struct SnapshotTraffic<RT: Runtime = Tokio> {
    counters: Arc<SnapshotCounters>,
    bytes_per_second: Option<u64>,
    busy_bytes_per_second: Option<u64>,
    log: Mutex<LogLoad<RT>>,
    /// When the next chunk may go.
    next_at: Mutex<Option<RT::Instant>>,
    rate: Mutex<RateMeter<RT>>,
    transfers: Arc<Semaphore>,
}

/// Bytes a second between the last two samples.
struct RateMeter<RT: Runtime> {
    sampled: Option<(RT::Instant, u64)>,
    bytes_per_second: u64,
}

/// Tells how many bytes a node's log has taken in since it was opened.
pub type LogWritten = Arc<dyn Fn() -> u64 + Send + Sync>;

/// A log that takes in more than this, in bytes a second, is busy: heartbeats and a few small pushes are less.
const BUSY_BYTES_PER_SECOND: f64 = (1 << 20) as f64;
/// Between two looks at the log, at the least.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Whether the node's log was busy, as of the last look.
struct LogLoad<RT: Runtime> {
    written: Option<LogWritten>,
    looked: Option<(RT::Instant, u64)>,
    is_busy: bool,
}

impl<RT: Runtime> LogLoad<RT> {
    fn is_busy(&mut self) -> bool {
        let Some(written) = &self.written else { return false };
        let now = RT::Instant::now();
        match self.looked {
            Some((at, _)) if now - at < LOOK_EVERY => {}
            Some((at, before)) => {
                let bytes = written();
                let rate = bytes.saturating_sub(before) as f64 / (now - at).as_secs_f64();
                self.is_busy = rate > BUSY_BYTES_PER_SECOND;
                self.looked = Some((now, bytes));
            }
            None => self.looked = Some((now, written())),
        }
        self.is_busy
    }
}

/// Between two samples, at the least.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

impl<RT: Runtime> RateMeter<RT> {
    fn sample(&mut self, bytes: u64) -> u64 {
        let now = RT::Instant::now();
        match self.sampled {
            Some((at, before)) => {
                let passed = now - at;
                if passed >= SAMPLE_EVERY {
                    self.bytes_per_second = ((bytes - before) as f64 / passed.as_secs_f64()) as u64;
                    self.sampled = Some((now, bytes));
                }
            }
            None => self.sampled = Some((now, bytes)),
        }
        self.bytes_per_second
    }
}

impl<RT: Runtime> SnapshotTraffic<RT> {
    /// With the rate of these limits.
    #[must_use]
    pub fn new(limits: &RaftLimits) -> Arc<Self> {
        Arc::new(Self {
            counters: Arc::default(),
            bytes_per_second: limits.snapshot_bytes_per_second,
            busy_bytes_per_second: limits.snapshot_busy_bytes_per_second,
            log: Mutex::new(LogLoad { written: None, looked: None, is_busy: false }),
            next_at: Mutex::new(None),
            rate: Mutex::new(RateMeter { sampled: None, bytes_per_second: 0 }),
            transfers: Arc::new(Semaphore::new(TRANSFERS_MAX)),
        })
    }

    /// Figures as of now. The rate is over the time since they were asked for last, a second at the least.
    #[must_use]
    pub fn figures(&self) -> SnapshotFigures {
        let counters = &*self.counters;
        let bytes_per_second = self.rate.lock().sample(counters.bytes_sent.get());
        SnapshotFigures {
            bytes_per_second,
            sent: counters.sent.get(),
            failed: counters.failed.get(),
            resumed: counters.resumed.get(),
            received: counters.received.get(),
            bytes_sent: counters.bytes_sent.get(),
            bytes_skipped: counters.bytes_skipped.get(),
            bytes_received: counters.bytes_received.get(),
            chunks_repeated: counters.chunks_repeated.get(),
        }
    }

    /// From now on `written` says how many bytes the node's log has taken in, over all groups, since it was opened.
    pub(crate) fn watch_log(&self, written: LogWritten) {
        self.log.lock().written = Some(written);
    }

    /// Bytes a second that may go now.
    fn rate(&self, is_late: bool) -> Option<u64> {
        match self.busy_bytes_per_second {
            Some(busy) if !is_late && self.log.lock().is_busy() => {
                Some(self.bytes_per_second.map_or(busy, |rate| rate.min(busy)))
            }
            _ => self.bytes_per_second,
        }
    }

    pub(crate) fn counters(&self) -> &Arc<SnapshotCounters> {
        &self.counters
    }

    /// Waits for a place among the transfers. Each of those before has a deadline for every answer.
    pub(crate) async fn admit(&self) -> Option<OwnedSemaphorePermit> {
        // It is never closed.
        Arc::clone(&self.transfers).acquire_owned().await.ok()
    }

    /// Waits until `bytes` may go. One that is late does not give way to pushes.
    pub(crate) async fn wait_for(&self, bytes: usize, is_late: bool) {
        let Some(rate) = self.rate(is_late) else { return };
        let now = RT::Instant::now();
        let at = {
            let mut next_at = self.next_at.lock();
            let at = next_at.map_or(now, |next| next.max(now));
            *next_at = Some(at + Duration::from_secs_f64(bytes as f64 / rate as f64));
            at
        };
        if at > now {
            RT::sleep_until(at).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use openraft::AsyncRuntime;
    use openraft_rt_sim::SimRuntime;

    use super::*;

    #[test]
    fn a_busy_log_has_the_right_of_way() {
        let limits = RaftLimits {
            snapshot_bytes_per_second: Some(10_000_000),
            snapshot_busy_bytes_per_second: Some(1_000_000),
            ..RaftLimits::default()
        };
        SimRuntime::with_seed(1).block_on(async move {
            let traffic = SnapshotTraffic::<SimRuntime>::new(&limits);
            let written = Arc::new(AtomicU64::new(0));
            let seen = Arc::clone(&written);
            traffic.watch_log(Arc::new(move || seen.load(Ordering::Relaxed)));
            let mut took = Vec::new();
            // A silent log, one that takes in 5 MB a second, the same for a transfer that is late, a silent one.
            for (pushed, is_late) in [(0, false), (500_000, false), (500_000, true), (0, false)] {
                let began = <SimRuntime as AsyncRuntime>::Instant::now();
                for _ in 0..100 {
                    traffic.wait_for(100_000, is_late).await;
                    // As much as comes in a tenth of a second.
                    written.fetch_add(pushed, Ordering::Relaxed);
                }
                took.push(<SimRuntime as AsyncRuntime>::Instant::now() - began);
            }
            let seconds: Vec<f64> = took.iter().map(Duration::as_secs_f64).collect();
            assert!(seconds[0] < 1.1 && seconds[1] > 8.0, "{seconds:?}");
            assert!(seconds[2] < 2.0 && seconds[3] < 2.0, "{seconds:?}");
        });
    }

    #[test]
    fn receivers_share_one_rate() {
        let limits = RaftLimits { snapshot_bytes_per_second: Some(1_000_000), ..RaftLimits::default() };
        SimRuntime::with_seed(1).block_on(async move {
            let traffic = SnapshotTraffic::<SimRuntime>::new(&limits);
            let began = <SimRuntime as AsyncRuntime>::Instant::now();
            let send = |chunks: u32| {
                let traffic = Arc::clone(&traffic);
                async move {
                    for _ in 0..chunks {
                        traffic.wait_for(100_000, false).await;
                    }
                }
            };
            futures_util::future::join3(send(10), send(20), send(11)).await;
            // The first goes at once, and each of the other 40 a tenth of a second after the one before.
            let took = <SimRuntime as AsyncRuntime>::Instant::now() - began;
            assert!(took >= Duration::from_secs(4) && took < Duration::from_millis(4_100), "{took:?}");
        });
    }
}
