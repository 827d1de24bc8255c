//! What an operator reads while a snapshot is sent: how much of it went, and how fast.
//!
//! Not here: metrics (`traffic`).

use std::time::Duration;

use openraft::Instant as _;

use crate::transport::Target;
use crate::type_config::Runtime;

/// Between two lines.
const EVERY: Duration = Duration::from_secs(5);

/// One attempt to send one snapshot.
pub(crate) struct Progress<RT: Runtime> {
    group: u64,
    replica: u64,
    node: u64,
    total: u64,
    skipped: u64,
    sent: u64,
    began_at: RT::Instant,
    said: (RT::Instant, u64),
}

impl<RT: Runtime> Progress<RT> {
    pub(crate) fn start(target: &Target, total: u64, skipped: u64) -> Self {
        let now = RT::Instant::now();
        let (group, replica, node) = (target.group, target.replica, target.peer.node);
        tracing::info!(
            "sending raft snapshot of group {group} to replica {replica} on node {node}: {} to send, {} there already",
            size(total.saturating_sub(skipped)),
            size(skipped)
        );
        Self { group, replica, node, total, skipped, sent: 0, began_at: now, said: (now, 0) }
    }

    pub(crate) fn add(&mut self, bytes: u64) {
        self.sent += bytes;
        let now = RT::Instant::now();
        let (at, sent) = self.said;
        if now - at < EVERY {
            return;
        }
        self.said = (now, self.sent);
        tracing::info!(
            "sending raft snapshot of group {} to replica {} on node {}: {} of {}, {}/s",
            self.group,
            self.replica,
            self.node,
            size(self.skipped + self.sent),
            size(self.total),
            size(rate(self.sent - sent, now - at))
        );
    }

    pub(crate) fn installing(&self) {
        tracing::info!(
            "sent raft snapshot of group {} to replica {} on node {}: {} at {}/s; it is being installed",
            self.group,
            self.replica,
            self.node,
            size(self.sent),
            size(rate(self.sent, RT::Instant::now() - self.began_at))
        );
    }

    pub(crate) fn installed(&self) {
        tracing::info!(
            "replica {} of group {} on node {} has installed the snapshot, {:.1} s after it began",
            self.replica,
            self.group,
            self.node,
            (RT::Instant::now() - self.began_at).as_secs_f64()
        );
    }
}

fn rate(bytes: u64, time: Duration) -> u64 {
    (bytes as f64 / time.as_secs_f64().max(1e-3)) as u64
}

/// A size for people.
fn size(bytes: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    match UNITS.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let read = [0, 999, 1_500, 140_000_000, 4_810_000_000].map(size);
        assert_eq!(read, ["0 B", "999 B", "1.5 kB", "140.0 MB", "4.8 GB"]);
    }
}
