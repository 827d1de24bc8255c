//! A client without comforts: one unary call at a time, every number chosen by the test. For what a well-behaved client
//! never sends, and as a second opinion about the wire.

use std::collections::BTreeMap;

use bytes::Bytes;
use evershard_proto::key::key_of;
use evershard_proto::push_body::{Encoding, Operation, PushBodyBuilder};
use evershard_proto::v1::admin_service_client::AdminServiceClient;
use evershard_proto::v1::parameter_service_client::ParameterServiceClient;
use evershard_proto::v1::{
    Consistency, CreateTableRequest, ErrorDetail, ErrorKind, OpenSessionRequest, PullReply, PullRequest,
    PushReply, PushRequest, ShardDescription, TableDefinition,
};
use prost::Message;
use tonic::Status;

use super::{Cluster, eventually};

/// A session opened by hand.
#[derive(Debug)]
pub(crate) struct RawSession {
    pub(crate) number: u64,
    /// The last seq used, by group.
    pub(crate) seqs: BTreeMap<u64, u64>,
}

impl RawSession {
    pub(crate) async fn open(cluster: &Cluster) -> Self {
        let nonce = Bytes::copy_from_slice(&rand::random::<[u8; 16]>());
        let number = eventually("a session", || async {
            let request = OpenSessionRequest { nonce: nonce.clone(), worker: None };
            match cluster.admin(1).open_session(request).await {
                Ok(reply) => Ok(reply.into_inner().session),
                Err(status) => Err(status.to_string()),
            }
        })
        .await;
        RawSession { number, seqs: BTreeMap::new() }
    }

    /// The next seq for a group.
    pub(crate) fn next(&mut self, group: u64) -> u64 {
        let seq = self.seqs.entry(group).or_default();
        *seq += 1;
        *seq
    }
}

/// Creates a table by hand and gives its number.
pub(crate) async fn create_table(cluster: &Cluster, definition: TableDefinition) -> Result<u32, Status> {
    let mut admin: AdminServiceClient<_> = cluster.admin(1);
    let reply = admin.create_table(CreateTableRequest { definition: Some(definition) }).await?;
    Ok(reply.into_inner().number)
}

/// The shard that holds an id.
pub(crate) async fn shard_of(cluster: &Cluster, table: u32, id: u64) -> ShardDescription {
    let key = key_of(table, id);
    let routing = cluster.routing(1).await.unwrap();
    routing.shards.into_iter().find(|shard| (shard.range_start..=shard.range_end).contains(&key)).unwrap()
}

/// A body of one section of gradients.
pub(crate) fn body(session: u64, seq: u64, table: u32, dim: u32, ids: &[u64], gradients: &[f32]) -> Bytes {
    let keys: Vec<u64> = ids.iter().map(|id| key_of(table, *id)).collect();
    let mut builder = PushBodyBuilder::new(0);
    let payload = builder.section(table, Operation::Gradient, Encoding::F32, dim, None, &keys);
    for (bytes, gradient) in payload.chunks_exact_mut(4).zip(gradients) {
        bytes.copy_from_slice(&gradient.to_le_bytes());
    }
    builder.finish(session, seq, 0)
}

/// One try at one node.
pub(crate) async fn push(cluster: &Cluster, node: u64, group: u64, body: Bytes) -> Result<PushReply, Status> {
    let mut client = ParameterServiceClient::new(cluster.channel(node));
    client.push(PushRequest { group, body }).await.map(tonic::Response::into_inner)
}

/// One try at one node.
pub(crate) async fn pull(
    cluster: &Cluster,
    node: u64,
    group: u64,
    table: u32,
    ids: &[u64],
) -> Result<PullReply, Status> {
    let keys: Vec<u8> = ids.iter().flat_map(|id| key_of(table, *id).to_le_bytes()).collect();
    let mut client = ParameterServiceClient::new(cluster.channel(node));
    let consistency = Consistency::Leader.into();
    let request =
        PullRequest { group, table, consistency, keys: keys.into(), want_exists: true, newer_than: 0 };
    client.pull(request).await.map(tonic::Response::into_inner)
}

/// What a status says for programs.
pub(crate) fn kind(status: &Status) -> ErrorKind {
    ErrorDetail::decode(status.details()).map_or(ErrorKind::Unspecified, |detail| detail.kind())
}
