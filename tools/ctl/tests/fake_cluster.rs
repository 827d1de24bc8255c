//! The whole program against a node that answers from a script: exit codes, stdout, and the JSON that scripts rely on.
//!
//! Not here: a real cluster (`tests/ctl_shapes.rs` of the workspace).

use std::net::SocketAddr;
use std::process::{Command, Output};

use evershard_proto::v1::admin_service_server::{AdminService, AdminServiceServer};
use evershard_proto::v1::{self as pb};
use serde_json::Value;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Node 1 of two; node 2 is dead.
struct FakeNode {
    own: String,
    dead: String,
    created: bool,
    equal: bool,
}

#[tonic::async_trait]
impl AdminService for FakeNode {
    async fn init_cluster(
        &self,
        _: Request<pb::InitClusterRequest>,
    ) -> Result<Response<pb::InitClusterReply>, Status> {
        if self.created {
            return Err(Status::already_exists("this node belongs to cluster c-1"));
        }
        Ok(Response::new(pb::InitClusterReply { cluster_id: "c-1".into() }))
    }

    async fn get_routing(&self, _: Request<pb::GetRoutingRequest>) -> Result<Response<pb::Routing>, Status> {
        if !self.created {
            return Ok(Response::new(pb::Routing::default()));
        }
        let node =
            |id, address: &str| pb::NodeDescription { id, address: address.into(), state: "up".into() };
        let replica = |node| pb::ReplicaDescription { replica: node + 10, node };
        let definition = pb::TableDefinition {
            name: "items".into(),
            dim: 4,
            optimizer: Some(sgd(0.5)),
            ..Default::default()
        };
        Ok(Response::new(pb::Routing {
            recovery_epoch: 0,
            cluster_id: "c-1".into(),
            version: 7,
            nodes: vec![node(1, &self.own), node(2, &self.dead)],
            shards: vec![pb::ShardDescription {
                shard: 0,
                group: 1,
                range_start: 0,
                range_end: u64::MAX,
                replicas: vec![replica(1), replica(2)],
                leader_node: 1,
            }],
            tables: vec![
                pb::TableDescription { number: 3, definition: Some(definition), definition_version: 5 },
                pb::TableDescription { number: 4, definition: Some(tensor()), definition_version: 0 },
            ],
            software_version: "0.1.0".into(),
            meta_leader_node: 1,
            cluster_version: 1,
        }))
    }

    async fn get_node_status(
        &self,
        request: Request<pb::GetNodeStatusRequest>,
    ) -> Result<Response<pb::NodeStatus>, Status> {
        let digest = if request.get_ref().with_digest { "00ff".to_owned() } else { String::new() };
        Ok(Response::new(pb::NodeStatus {
            given_up: Vec::new(),
            node: 1,
            cluster_id: "c-1".into(),
            replicas: vec![pb::ReplicaStatus {
                group: 1,
                replica: 11,
                role: "leader".into(),
                term: 5,
                last_index: 9,
                committed: 8,
                applied: 8,
                flushed: 6,
                purged: 4,
                digest,
                digest_index: 8,
                tables: vec![pb::TableCount {
                    table: 3,
                    rows: 100,
                    memory_bytes: 1 << 20,
                    resident: 100,
                    overhead_bytes: 3200,
                    uncounted: false,
                    free_bytes: 0,
                }],
                leader_node: 1,
                ..Default::default()
            }],
            software_version: "0.1.0".into(),
            ready: true,
            uptime_ms: 1,
            cluster_version_max: 2,
            disk: None,
        }))
    }

    async fn get_non_finite(
        &self,
        asked: Request<pb::GetNonFiniteRequest>,
    ) -> Result<Response<pb::GetNonFiniteReply>, Status> {
        let table = asked.into_inner().table;
        let counts = |skipped, clipped| Some(pb::NonFiniteCounts { rejected: 0, skipped, clipped });
        let source = |counts| pb::NonFiniteSource { session: 9, job: 3, rank: 1, is_step: false, counts };
        let rows = pb::NonFiniteRows {
            table,
            action: pb::NonFiniteAction::Skipped.into(),
            count: 2,
            id: 42,
            column: 3,
            value: f32::NAN,
            of_sum: false,
        };
        let offence = pb::NonFiniteOffence { time_ms: 1000, rows: Some(rows), source: Some(source(None)) };
        let ledger = |of, last| Some(pb::NonFiniteLedger { total: of, sources: vec![source(of)], last });
        let replica = pb::ReplicaNonFinite {
            shard: 0,
            logged: ledger(counts(2, 0), vec![offence]),
            heard: ledger(counts(0, 5), Vec::new()),
        };
        Ok(Response::new(pb::GetNonFiniteReply { replicas: vec![replica] }))
    }

    async fn scrub(&self, asked: Request<pb::ScrubRequest>) -> Result<Response<pb::ScrubReply>, Status> {
        let digest = |node, digest: &str| pb::ReplicaDigest { node, digest: digest.into() };
        let digests = vec![digest(1, "aa"), digest(2, if self.equal { "aa" } else { "bb" })];
        let quarantined = if asked.get_ref().repair && !self.equal { vec![2] } else { vec![] };
        let shard =
            pb::ShardDigests { index: 9, digests, equal: self.equal, quarantined, ..Default::default() };
        Ok(Response::new(pb::ScrubReply { shards: vec![shard] }))
    }

    async fn create_table(
        &self,
        _: Request<pb::CreateTableRequest>,
    ) -> Result<Response<pb::TableDescription>, Status> {
        Err(Status::unimplemented("not in this script"))
    }

    async fn set_optimizer(
        &self,
        asked: Request<pb::SetOptimizerRequest>,
    ) -> Result<Response<pb::TableDescription>, Status> {
        let pb::SetOptimizerRequest { name, number, optimizer, expected_version } = asked.into_inner();
        assert_eq!((number, expected_version), (3, Some(5)));
        let definition = pb::TableDefinition { name, dim: 4, optimizer, ..Default::default() };
        Ok(Response::new(pb::TableDescription {
            number,
            definition: Some(definition),
            definition_version: 6,
        }))
    }

    async fn drop_table(
        &self,
        _: Request<pb::DropTableRequest>,
    ) -> Result<Response<pb::DropTableReply>, Status> {
        Err(Status::unimplemented("not in this script"))
    }

    async fn open_session(
        &self,
        _: Request<pb::OpenSessionRequest>,
    ) -> Result<Response<pb::OpenSessionReply>, Status> {
        Err(Status::unimplemented("not in this script"))
    }

    async fn renew_session(
        &self,
        _: Request<pb::RenewSessionRequest>,
    ) -> Result<Response<pb::RenewSessionReply>, Status> {
        Err(Status::unimplemented("not in this script"))
    }

    async fn transfer_leader(
        &self,
        _: Request<pb::TransferLeaderRequest>,
    ) -> Result<Response<pb::TransferLeaderReply>, Status> {
        Err(Status::unimplemented("not in this script"))
    }

    async fn raise_version(
        &self,
        asked: Request<pb::RaiseVersionRequest>,
    ) -> Result<Response<pb::RaiseVersionReply>, Status> {
        match asked.into_inner().version {
            None => Ok(Response::new(pb::RaiseVersionReply { version: 2 })),
            Some(version) if version < 3 => Ok(Response::new(pb::RaiseVersionReply { version })),
            Some(_) => Err(Status::invalid_argument("the build of node 2 knows versions up to 2")),
        }
    }

    async fn unsafe_recover(
        &self,
        asked: Request<pb::UnsafeRecoverRequest>,
    ) -> Result<Response<pb::UnsafeRecoverReply>, Status> {
        assert_eq!((&*asked.get_ref().cluster_id, &asked.get_ref().lost_nodes), ("c-1", &vec![2, 3]));
        let group = pb::RecoveredGroup { group: 1, shard: 0, replica: 11, last_index: 9 };
        Ok(Response::new(pb::UnsafeRecoverReply { groups: vec![group] }))
    }
}

fn tensor() -> pb::TableDefinition {
    let tensor = pb::TensorDefinition { shape: vec![300, 100], dtype: pb::TensorDtype::Bf16.into() };
    pb::TableDefinition {
        name: "net.weight".into(),
        kind: pb::TableKind::Dense.into(),
        dim: 16_384,
        tensor: Some(tensor),
        ..Default::default()
    }
}

fn sgd(lr: f32) -> pb::Optimizer {
    let kind = pb::optimizer::Kind::Sgd(pb::Sgd { lr });
    pb::Optimizer { kind: Some(kind), weight_decay: 0.25, ..Default::default() }
}

/// A fake node on a port of its own, living as long as the test's runtime.
async fn fake(created: bool, equal: bool) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = url(listener.local_addr().unwrap());
    let node = FakeNode { own: own.clone(), dead: dead(), created, equal };
    let server = tonic::transport::Server::builder().add_service(AdminServiceServer::new(node));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    own
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

/// An address where nobody listens.
fn dead() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    url(listener.local_addr().unwrap())
}

async fn ctl(endpoints: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evershardctl"));
    command.args(["--endpoints", endpoints]).args(args);
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn status_has_the_stable_shape_and_shows_dead_nodes() {
    let node = fake(true, true).await;
    let output = ctl(&node, &["status", "--output", "json"]).await;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let status = json(&output);
    assert_eq!(status["cluster"]["id"], "c-1");
    assert_eq!(status["cluster"]["version"], "0.1.0");
    assert_eq!(status["cluster"]["cluster_version"], 1);
    assert_eq!(status["nodes"][0]["state"], "up");
    assert_eq!(status["nodes"][1]["state"], "down");
    let shard = &status["shards"][0];
    assert_eq!(shard["range_start"], 0);
    assert_eq!(shard["range_end"], u64::MAX);
    assert_eq!((&shard["leader"], &shard["term"]), (&Value::from(1), &Value::from(5)));
    let replica = &shard["replicas"][0];
    for (field, value) in
        [("node", 1), ("last_index", 9), ("committed", 8), ("applied", 8), ("flushed", 6), ("purged", 4)]
    {
        assert_eq!(replica[field], value, "{field}");
    }
    assert_eq!((&replica["role"], &replica["digest"]), (&Value::from("leader"), &Value::from("00ff")));
    assert_eq!(shard["replicas"][1]["role"], "unreachable");
    assert_eq!(shard["replicas"][1]["applied"], Value::Null);
    let table = &status["tables"][0];
    assert_eq!((&table["name"], &table["kind"]), (&Value::from("items"), &Value::from("sparse")));
    assert_eq!((&table["dim"], &table["rows"]), (&Value::from(4), &Value::from(100)));
    assert_eq!(status["jobs"], Value::Array(Vec::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_living_endpoint_is_enough() {
    let node = fake(true, true).await;
    let output = ctl(&format!("{},{node}", dead()), &["status"]).await;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("DEGRADED: down: node 2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn scrub_fails_when_replicas_differ() {
    let equal = ctl(&fake(true, true).await, &["scrub", "--output", "json"]).await;
    assert_eq!(equal.status.code(), Some(0));
    assert_eq!(json(&equal)["shards"][0]["digests"]["2"], "aa");
    let differ = ctl(&fake(true, false).await, &["scrub", "--output", "json"]).await;
    assert_eq!(differ.status.code(), Some(1));
    assert_eq!(json(&differ)["shards"][0]["equal"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_is_confirmed_and_only_where_replicas_differ() {
    let differ = fake(true, false).await;
    // There is no terminal to ask.
    let unconfirmed = ctl(&differ, &["scrub", "--repair"]).await;
    assert_eq!(unconfirmed.status.code(), Some(2), "{}", stderr(&unconfirmed));
    assert!(stderr(&unconfirmed).contains("--yes"), "{}", stderr(&unconfirmed));
    let repaired = ctl(&differ, &["scrub", "--repair", "--yes", "--output", "json"]).await;
    assert_eq!(repaired.status.code(), Some(0), "{}", stderr(&repaired));
    assert_eq!(json(&repaired)["shards"][0]["quarantined"][0], 2);
    let equal = ctl(&fake(true, true).await, &["scrub", "--repair", "--output", "json"]).await;
    assert_eq!(equal.status.code(), Some(0), "nothing to ask: {}", stderr(&equal));
    assert!(json(&equal)["shards"][0].get("quarantined").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unsafe_recovery_is_confirmed_and_names_what_is_lost() {
    let node = fake(true, true).await;
    let survivor = ["cluster", "unsafe-recover", "--survivor", &node];
    let unnamed = ctl(&node, &survivor).await;
    assert_eq!(unnamed.status.code(), Some(2), "{}", stderr(&unnamed));
    let named = [&survivor[..], &["--lost-nodes", "2,3", "--cluster-id", "c-1"]].concat();
    let unconfirmed = ctl(&node, &named).await;
    assert_eq!(unconfirmed.status.code(), Some(2), "{}", stderr(&unconfirmed));
    assert!(stderr(&unconfirmed).contains("nodes 2, 3"), "{}", stderr(&unconfirmed));
    let recovered = ctl(&node, &[&named[..], &["--yes", "--output", "json"]].concat()).await;
    assert_eq!(recovered.status.code(), Some(0), "{}", stderr(&recovered));
    assert_eq!(json(&recovered)["groups"][0]["replica"], 11);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_version_is_raised_when_that_is_confirmed() {
    let node = fake(true, true).await;
    let raise = ["cluster", "raise-version"];
    let unconfirmed = ctl(&node, &raise).await;
    assert_eq!(unconfirmed.status.code(), Some(2), "{}", stderr(&unconfirmed));
    assert!(stderr(&unconfirmed).contains("older build"), "{}", stderr(&unconfirmed));
    let raised = ctl(&node, &[&raise[..], &["--yes", "--output", "json"]].concat()).await;
    assert_eq!(raised.status.code(), Some(0), "{}", stderr(&raised));
    assert_eq!(json(&raised)["cluster_version"], 2);
    let to = ctl(&node, &[&raise[..], &["--yes", "--to", "1"]].concat()).await;
    assert_eq!(String::from_utf8_lossy(&to.stdout).trim(), "cluster version 1");
    let beyond = ctl(&node, &[&raise[..], &["--yes", "--to", "3"]].concat()).await;
    assert_eq!(beyond.status.code(), Some(1));
    assert!(stderr(&beyond).contains("node 2"), "{}", stderr(&beyond));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_shows_who_pushed_what_is_not_finite() {
    let node = fake(true, true).await;
    let shown = json(&ctl(&node, &["table", "show", "items", "--output", "json"]).await);
    assert_eq!(shown["non_finite"], "reject");
    let of = &shown["non_finite_counts"];
    assert_eq!(of["total"], serde_json::json!({ "rejected": 0, "skipped": 2, "clipped": 5 }));
    assert_eq!(of["sources"][0]["session"], 9);
    assert_eq!((&of["sources"][0]["job"], &of["sources"][0]["rank"]), (&3.into(), &1.into()));
    assert_eq!((&of["sources"][0]["skipped"], &of["sources"][0]["clipped"]), (&2.into(), &5.into()));
    assert_eq!((&of["last"][0]["id"], &of["last"][0]["value"]), (&42.into(), &"NaN".into()));
    assert_eq!((&of["last"][0]["action"], &of["last"][0]["column"]), (&"skipped".into(), &3.into()));
    let plain = ctl(&node, &["table", "show", "items"]).await;
    let text = String::from_utf8_lossy(&plain.stdout);
    assert!(text.contains("job 3 rank 1 (session 9)") && text.contains("NaN"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_optimizer_is_changed_in_what_is_given() {
    let node = fake(true, true).await;
    let set = ["table", "set-optimizer", "items"];
    let changed = ctl(&node, &[&set[..], &["--lr", "0.125", "--output", "json"]].concat()).await;
    assert_eq!(changed.status.code(), Some(0), "{}", stderr(&changed));
    let shown = json(&changed);
    assert_eq!(shown["definition_version"], 6);
    assert_eq!(shown["optimizer"], serde_json::json!({ "kind": "sgd", "lr": 0.125, "weight_decay": 0.25 }));
    let nothing = ctl(&node, &set).await;
    assert_eq!(nothing.status.code(), Some(2), "{}", stderr(&nothing));
    let foreign = ctl(&node, &[&set[..], &["--beta1", "0.5"]].concat()).await;
    assert_eq!(foreign.status.code(), Some(2));
    assert!(
        stderr(&foreign).contains("sgd lr=0.5") && stderr(&foreign).contains("no --beta1"),
        "{}",
        stderr(&foreign)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tensors_are_shown_with_shape_dtype_and_blocks() {
    let node = fake(true, true).await;
    let listed = json(&ctl(&node, &["table", "list", "--output", "json"]).await);
    assert_eq!(listed["tables"][0].get("shape"), None, "of a sparse table");
    for shown in [
        listed["tables"][1].clone(),
        json(&ctl(&node, &["table", "show", "net.weight", "--output", "json"]).await),
    ] {
        assert_eq!(shown["kind"], "dense");
        assert_eq!(shown["shape"], serde_json::json!([300, 100]));
        assert_eq!((&shown["dtype"], &shown["blocks"]), (&Value::from("bf16"), &Value::from(2)));
    }
    let table = ctl(&node, &["table", "list"]).await;
    assert!(String::from_utf8_lossy(&table.stdout).contains("bf16 [300, 100] (2 blocks)"));
}

#[tokio::test(flavor = "multi_thread")]
async fn exit_codes_tell_usage_failure_and_absence_apart() {
    let node = fake(true, true).await;
    let unknown = ctl(&node, &["table", "get", "nothing", "1"]).await;
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        stderr(&unknown).contains("no table nothing; there are: items, net.weight"),
        "{}",
        stderr(&unknown)
    );
    let usage = ctl(&node, &["table", "get", "items", "not-a-number"]).await;
    assert_eq!(usage.status.code(), Some(2));
    let address = dead();
    let absent = ctl(&address, &["--timeout", "1", "status"]).await;
    assert_eq!(absent.status.code(), Some(3));
    assert!(stderr(&absent).contains(&address), "{}", stderr(&absent));
    let no_url = ctl("localhost", &["status"]).await;
    assert_eq!(no_url.status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_created_once() {
    let fresh = fake(false, true).await;
    let looked = ctl(&fresh, &["status"]).await;
    assert_eq!(looked.status.code(), Some(1));
    assert!(stderr(&looked).contains("cluster init"), "{}", stderr(&looked));
    let created = ctl(&fresh, &["cluster", "init", "--node", &format!("1={fresh}"), "--replicas", "1"]).await;
    assert_eq!(created.status.code(), Some(0), "{}", stderr(&created));
    assert_eq!(String::from_utf8_lossy(&created.stdout).trim(), "c-1");
    let old = fake(true, true).await;
    let again = ctl(&old, &["cluster", "init", "--node", &format!("1={old}"), "--replicas", "1"]).await;
    assert_eq!(again.status.code(), Some(1));
    assert!(stderr(&again).contains("belongs to cluster c-1"), "{}", stderr(&again));
}
