//! What `status --output json` prints. Its fields are relied on by scripts: add freely, never rename.

use std::collections::BTreeMap;
use std::time::Duration;

use evershard_proto::tensor::TensorLayout;
use evershard_proto::v1::{
    GetNodeStatusRequest, NodeStatus, ReplicaStatus, Routing, ShardDescription, TableDefinition, TableKind,
    TensorDtype,
};
use futures_util::future::join_all;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use crate::cli::Global;
use crate::commands::job::{self, JobView};
use crate::connection::Connection;
use crate::error::CtlError;

/// A node that is alive answers well within this.
const NODE_ANSWER_MAX: Duration = Duration::from_secs(3);

/// The whole cluster.
#[derive(Debug, Serialize)]
pub(crate) struct ClusterView {
    pub(crate) cluster: ClusterId,
    pub(crate) nodes: Vec<NodeView>,
    pub(crate) shards: Vec<ShardView>,
    pub(crate) tables: Vec<TableView>,
    /// Jobs come with the job service.
    pub(crate) jobs: Vec<JobView>,
}

/// Which cluster, and of which software.
#[derive(Debug, Serialize)]
pub(crate) struct ClusterId {
    pub(crate) id: String,
    /// Of the software on the node that answered.
    pub(crate) version: String,
    pub(crate) routing_version: u64,
    /// What the cluster may use of its nodes' builds.
    pub(crate) cluster_version: u32,
    pub(crate) meta_leader: Option<u64>,
}

/// One server process.
#[derive(Debug, Serialize)]
pub(crate) struct NodeView {
    pub(crate) id: u64,
    pub(crate) address: String,
    /// "up", "starting", "draining" or "down".
    pub(crate) state: String,
    pub(crate) version: Option<String>,
    pub(crate) uptime_ms: Option<u64>,
    pub(crate) leads: usize,
    pub(crate) replicas: usize,
    pub(crate) disk: Option<DiskView>,
}

/// A node's disk.
#[derive(Debug, Serialize)]
pub(crate) struct DiskView {
    pub(crate) path: String,
    pub(crate) free_bytes: u64,
    pub(crate) free_inodes: u64,
    pub(crate) low_water_bytes: u64,
    /// Less is free: the node takes no pushes, and leads nothing that another could lead.
    pub(crate) low: bool,
    /// It hangs: the node leads nothing.
    pub(crate) stalled: bool,
    /// What is wrong, for people.
    pub(crate) note: Option<String>,
}

impl DiskView {
    fn of(status: &NodeStatus) -> Option<Self> {
        let disk = status.disk.as_ref()?;
        Some(DiskView {
            path: disk.path.clone(),
            free_bytes: disk.free_bytes,
            free_inodes: disk.free_inodes,
            low_water_bytes: disk.low_water_bytes,
            low: disk.low,
            stalled: disk.stalled,
            note: Some(disk.note.clone()).filter(|note| !note.is_empty()),
        })
    }
}

/// One shard.
#[derive(Debug, Serialize)]
pub(crate) struct ShardView {
    pub(crate) id: u32,
    pub(crate) group: u64,
    /// Both inclusive.
    pub(crate) range_start: u64,
    pub(crate) range_end: u64,
    pub(crate) leader: Option<u64>,
    pub(crate) term: Option<u64>,
    pub(crate) replicas: Vec<ReplicaView>,
}

/// One copy of a shard. What an unreachable node would have told is null.
#[derive(Debug, Serialize)]
pub(crate) struct ReplicaView {
    pub(crate) node: u64,
    pub(crate) replica: u64,
    /// "leader", "follower", "learner", "candidate", "starting", "quarantined", "stopped", "missing" or "unreachable".
    pub(crate) role: String,
    pub(crate) last_index: Option<u64>,
    pub(crate) committed: Option<u64>,
    pub(crate) applied: Option<u64>,
    pub(crate) flushed: Option<u64>,
    pub(crate) purged: Option<u64>,
    pub(crate) digest: Option<String>,
    pub(crate) digest_index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) quarantine_reason: Option<String>,
}

/// One table.
#[derive(Debug, Serialize)]
pub(crate) struct TableView {
    pub(crate) name: String,
    pub(crate) number: u32,
    /// "sparse" or "dense".
    pub(crate) kind: String,
    pub(crate) dim: u32,
    /// Of a dense tensor.
    #[serde(flatten)]
    pub(crate) tensor: Option<TensorView>,
    /// As the leaders count them.
    pub(crate) rows: u64,
    /// False while replicas that were started lately count their rows: there are at least `rows`.
    pub(crate) counted: bool,
    /// Over all replicas that answered.
    pub(crate) memory_bytes: u64,
    /// Of it, places of rows that left, for the next ones that come.
    pub(crate) free_bytes: u64,
    /// Rows in memory, over all replicas.
    pub(crate) resident: u64,
    /// What a row in memory takes beside its floats.
    pub(crate) overhead_bytes_per_row: f64,
}

/// What a dense tensor is beside a table of blocks.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TensorView {
    pub(crate) shape: Vec<u64>,
    /// "f32", "f16" or "bf16": what its users have it in.
    pub(crate) dtype: &'static str,
    /// Each of `dim` elements; `rows` counts those that were ever changed.
    pub(crate) blocks: u64,
}

impl TensorView {
    /// `None` of a sparse table.
    pub(crate) fn of(definition: &TableDefinition) -> Option<Self> {
        let tensor = definition.tensor.as_ref()?;
        let dtype = match tensor.dtype() {
            TensorDtype::F32 => "f32",
            TensorDtype::F16 => "f16",
            TensorDtype::Bf16 => "bf16",
        };
        let blocks = TensorLayout::new(&tensor.shape).map_or(0, |layout| layout.blocks());
        Some(TensorView { shape: tensor.shape.clone(), dtype, blocks })
    }
}

impl ClusterView {
    /// Asks the cluster.
    pub(crate) async fn gather(global: &Global, with_digest: bool) -> Result<Self, CtlError> {
        let connection = Connection::open(global).await?;
        // A digest reads all rows: that may take as long as the user allows.
        let patience = if with_digest {
            connection.deadline()
        } else {
            connection.deadline().min(Instant::now() + NODE_ANSWER_MAX)
        };
        let answers = connection.nodes().map(|(id, node)| async move {
            let mut admin = node.admin();
            let ask = admin.get_node_status(GetNodeStatusRequest { with_digest, scrub_id: 0 });
            let answer = timeout_at(patience, ask).await;
            (id, answer.ok().and_then(Result::ok).map(tonic::Response::into_inner))
        });
        let answers: BTreeMap<u64, NodeStatus> =
            join_all(answers).await.into_iter().filter_map(|(id, status)| Some((id, status?))).collect();
        // The one who answers for jobs leads the meta group: while nobody does, the rest is still worth a look.
        let jobs = match timeout_at(patience, job::gather(&connection)).await {
            Ok(Ok(jobs)) => jobs.iter().map(JobView::of).collect(),
            Ok(Err(error)) => {
                eprintln!("the jobs are not shown: {error}");
                Vec::new()
            }
            Err(_) => {
                eprintln!("the jobs are not shown: no node answers for them now");
                Vec::new()
            }
        };
        Ok(ClusterView { jobs, ..Self::merge(&connection.routing, &answers) })
    }

    /// Puts the routing table and the nodes' answers together.
    pub(crate) fn merge(routing: &Routing, answers: &BTreeMap<u64, NodeStatus>) -> Self {
        let shards: Vec<ShardView> =
            routing.shards.iter().map(|shard| ShardView::merge(shard, answers)).collect();
        let nodes = routing
            .nodes
            .iter()
            .map(|node| {
                let status = answers.get(&node.id);
                let state = match status {
                    None => "down",
                    Some(_) if node.state == "draining" => "draining",
                    Some(status) if status.ready => "up",
                    Some(_) => "starting",
                };
                NodeView {
                    id: node.id,
                    address: node.address.clone(),
                    state: state.to_owned(),
                    version: status.map(|status| status.software_version.clone()),
                    uptime_ms: status.map(|status| status.uptime_ms),
                    leads: shards.iter().filter(|shard| shard.leader == Some(node.id)).count(),
                    replicas: shards
                        .iter()
                        .flat_map(|shard| &shard.replicas)
                        .filter(|r| r.node == node.id)
                        .count(),
                    disk: status.and_then(DiskView::of),
                }
            })
            .collect();
        let tables = routing.tables.iter().map(|table| TableView::merge(table, &shards, answers)).collect();
        let cluster = ClusterId {
            id: routing.cluster_id.clone(),
            version: routing.software_version.clone(),
            routing_version: routing.version,
            cluster_version: routing.cluster_version,
            meta_leader: Some(routing.meta_leader_node).filter(|node| *node != 0),
        };
        ClusterView { cluster, nodes, shards, tables, jobs: Vec::new() }
    }
}

/// A node's own account of its replica of a group.
fn account(answers: &BTreeMap<u64, NodeStatus>, node: u64, group: u64) -> Option<&ReplicaStatus> {
    answers.get(&node)?.replicas.iter().find(|replica| replica.group == group)
}

impl ShardView {
    fn merge(shard: &ShardDescription, answers: &BTreeMap<u64, NodeStatus>) -> Self {
        let mut replicas: Vec<ReplicaView> = shard
            .replicas
            .iter()
            .map(|placed| ReplicaView::merge(placed.node, placed.replica, answers, shard.group))
            .collect();
        replicas.sort_by_key(|replica| (replica.node, replica.replica));
        // An old leader that was cut off may still believe: the highest term is right.
        let believer = shard
            .replicas
            .iter()
            .filter_map(|placed| {
                account(answers, placed.node, shard.group).map(|status| (placed.node, status))
            })
            .filter(|(_, status)| status.role == "leader")
            .max_by_key(|(_, status)| status.term);
        let highest =
            shard.replicas.iter().filter_map(|p| account(answers, p.node, shard.group)).map(|s| s.term).max();
        ShardView {
            id: shard.shard,
            group: shard.group,
            range_start: shard.range_start,
            range_end: shard.range_end,
            leader: believer.map(|(node, _)| node),
            term: believer.map(|(_, status)| status.term).or(highest),
            replicas,
        }
    }
}

impl ReplicaView {
    fn merge(node: u64, replica: u64, answers: &BTreeMap<u64, NodeStatus>, group: u64) -> Self {
        let status = account(answers, node, group);
        let role = match (status, answers.contains_key(&node)) {
            (Some(status), _) => status.role.clone(),
            (None, true) => "missing".to_owned(),
            (None, false) => "unreachable".to_owned(),
        };
        let digest = status.map(|status| status.digest.clone()).filter(|digest| !digest.is_empty());
        ReplicaView {
            node,
            replica,
            role,
            last_index: status.map(|status| status.last_index),
            committed: status.map(|status| status.committed),
            applied: status.map(|status| status.applied),
            flushed: status.map(|status| status.flushed),
            purged: status.map(|status| status.purged),
            digest_index: digest.as_ref().and(status).map(|status| status.digest_index),
            digest,
            quarantine_reason: status
                .map(|s| s.quarantine_reason.clone())
                .filter(|reason| !reason.is_empty()),
        }
    }
}

impl TableView {
    fn merge(
        table: &evershard_proto::v1::TableDescription,
        shards: &[ShardView],
        answers: &BTreeMap<u64, NodeStatus>,
    ) -> Self {
        let count = |node: u64, group: u64| {
            let status = account(answers, node, group)?;
            status.tables.iter().find(|count| count.table == table.number)
        };
        let (mut rows, mut counted, mut resident) = (0, true, 0);
        let (mut memory_bytes, mut free_bytes, mut overhead_bytes) = (0, 0, 0);
        for shard in shards {
            let counts = shard.replicas.iter().filter_map(|replica| count(replica.node, shard.group));
            for count in counts.clone() {
                memory_bytes += count.memory_bytes;
                resident += count.resident;
                free_bytes += count.free_bytes;
                overhead_bytes += count.overhead_bytes;
            }
            // The leader's count; while it has none, another's; else whoever has most is nearest to the truth.
            let led = shard.leader.and_then(|leader| count(leader, shard.group));
            match led.into_iter().chain(counts.clone()).find(|count| !count.uncounted) {
                Some(count) => rows += count.rows,
                None => {
                    counted &= counts.clone().next().is_none();
                    rows += counts.map(|count| count.rows).max().unwrap_or(0);
                }
            }
        }
        let definition = table.definition.clone().unwrap_or_default();
        let tensor = TensorView::of(&definition);
        let kind = match definition.kind() {
            TableKind::Sparse => "sparse",
            TableKind::Dense => "dense",
        };
        TableView {
            name: definition.name,
            number: table.number,
            kind: kind.to_owned(),
            dim: definition.dim,
            tensor,
            rows,
            counted,
            memory_bytes,
            free_bytes,
            resident,
            overhead_bytes_per_row: if resident == 0 { 0.0 } else { overhead_bytes as f64 / resident as f64 },
        }
    }
}
