//! The status as people read it.

use comfy_table::Table;

use super::view::{ClusterView, ReplicaView};
use crate::commands::job;
use crate::output::table;

impl ClusterView {
    /// Everything, in one look.
    pub(crate) fn to_text(&self, digest: bool) -> String {
        let down: Vec<String> =
            self.nodes.iter().filter(|n| n.state == "down").map(|n| n.id.to_string()).collect();
        let leaderless = self.shards.iter().filter(|shard| shard.leader.is_none()).count();
        let health = match (down.is_empty(), leaderless) {
            (true, 0) => "healthy".to_owned(),
            (false, 0) => format!("DEGRADED: down: node {}", down.join(", node ")),
            (_, shards) => format!("UNAVAILABLE: {shards} shards without a leader"),
        };
        let mut text = format!("cluster {}  version {}  {health}\n\n", self.cluster.id, self.cluster.version);
        for part in [self.nodes_table(), self.shards_table(false), self.tables_table()] {
            text.push_str(&part.trim_fmt());
            text.push_str("\n\n");
        }
        if !self.jobs.is_empty() {
            text.push_str(&self.jobs_table().trim_fmt());
            text.push_str("\n\n");
        }
        for note in self.nodes.iter().filter_map(|node| node.disk.as_ref()?.note.as_ref()) {
            text.push_str(&format!("disk: {note}\n"));
        }
        if digest {
            text.push_str(&self.digests_table().trim_fmt());
        }
        text.trim_end().to_owned()
    }

    pub(crate) fn jobs_table(&self) -> Table {
        job::list::jobs_table(&self.jobs)
    }

    pub(crate) fn nodes_table(&self) -> Table {
        table(
            ["node", "address", "state", "leads", "replicas", "disk free", "version", "uptime"],
            self.nodes.iter().map(|node| {
                [
                    node.id.to_string(),
                    node.address.clone(),
                    node.state.clone(),
                    node.leads.to_string(),
                    node.replicas.to_string(),
                    node.disk.as_ref().map_or_else(|| "-".to_owned(), |disk| bytes(disk.free_bytes)),
                    node.version.clone().unwrap_or_else(|| "-".to_owned()),
                    node.uptime_ms.map_or_else(|| "-".to_owned(), duration),
                ]
            }),
        )
    }

    pub(crate) fn shards_table(&self, ranges: bool) -> Table {
        let rows = self.shards.iter().map(|shard| {
            let replicas: Vec<String> = shard.replicas.iter().map(replica).collect();
            let number = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
            (shard, [shard.id.to_string(), number(shard.leader), number(shard.term), replicas.join("  ")])
        });
        if ranges {
            return table(
                ["shard", "leader", "term", "range", "replicas (node role applied/last)"],
                rows.map(|(shard, [id, leader, term, replicas])| {
                    [
                        id,
                        leader,
                        term,
                        format!("{:016x}-{:016x}", shard.range_start, shard.range_end),
                        replicas,
                    ]
                }),
            );
        }
        table(["shard", "leader", "term", "replicas (node role applied/last)"], rows.map(|(_, cells)| cells))
    }

    pub(crate) fn tables_table(&self) -> Table {
        table(
            ["table", "kind", "dim", "shape", "rows", "memory"],
            self.tables.iter().map(|view| {
                [
                    view.name.clone(),
                    view.kind.clone(),
                    view.dim.to_string(),
                    view.tensor.as_ref().map_or_else(
                        || "-".to_owned(),
                        |tensor| format!("{} {:?} ({} blocks)", tensor.dtype, tensor.shape, tensor.blocks),
                    ),
                    if view.counted { view.rows.to_string() } else { format!("{}+", view.rows) },
                    bytes(view.memory_bytes),
                ]
            }),
        )
    }

    fn digests_table(&self) -> Table {
        let rows = self
            .shards
            .iter()
            .flat_map(|shard| shard.replicas.iter().map(move |replica| (shard.id, replica)));
        table(
            ["shard", "node", "digest", "at index"],
            rows.map(|(shard, replica)| {
                [
                    shard.to_string(),
                    replica.node.to_string(),
                    replica.digest.clone().unwrap_or_else(|| "-".to_owned()),
                    replica.digest_index.map_or_else(|| "-".to_owned(), |index| index.to_string()),
                ]
            }),
        )
    }
}

/// `2 follower 118/120`.
fn replica(view: &ReplicaView) -> String {
    match (view.applied, view.last_index, &view.quarantine_reason) {
        (_, _, Some(reason)) => format!("{} {}: {reason}", view.node, view.role),
        (Some(applied), Some(last), None) => format!("{} {} {applied}/{last}", view.node, view.role),
        _ => format!("{} {}", view.node, view.role),
    }
}

/// Bytes with a binary unit.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count;
    let mut rest = 0;
    let mut unit = 0;
    while value >= 1024 && unit + 1 < UNITS.len() {
        rest = (value % 1024) * 10 / 1024;
        value /= 1024;
        unit += 1;
    }
    if unit == 0 { format!("{value} B") } else { format!("{value}.{rest} {}", UNITS[unit]) }
}

/// Milliseconds as the two largest units.
fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_short() {
        assert_eq!(
            [bytes(0), bytes(1023), bytes(1536), bytes(u64::MAX)],
            ["0 B", "1023 B", "1.5 KiB", "16777215.9 TiB"]
        );
        assert_eq!([duration(999), duration(61_000), duration(3_660_000)], ["0s", "1m1s", "1h1m"]);
        assert_eq!(duration(90_000_000), "1d1h");
    }
}
