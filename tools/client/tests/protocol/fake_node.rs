//! A node that does what a test says: it shows every push that comes, and answers each as the test decides. It refuses as many
//! pulls and table creations as the test likes.
//!
//! Not here: any meaning. A test is the server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use evershard::{Client, ClientOptions, ErrorKind, PushHandle, PushOptions, Table, definition};
use evershard_proto::key::id_of;
use evershard_proto::push_body::PushBody;
use evershard_proto::v1::admin_service_server::{AdminService, AdminServiceServer};
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request as Asked;
use evershard_proto::v1::parameter_service_server::{ParameterService, ParameterServiceServer};
use evershard_proto::v1::*;
use parking_lot::Mutex;
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Code, Request, Response, Status, Streaming};

/// The only group.
pub(crate) const GROUP: u64 = 9;
/// Longer than any pause of the client.
const PATIENCE: Duration = Duration::from_secs(5);
pub(crate) const TABLE: u32 = 1;

/// What a node was asked beside pushes, and what it says.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) routing: Mutex<Routing>,
    pub(crate) lease_seconds: AtomicU32,
    pub(crate) opened: AtomicU64,
    pub(crate) renewed: Mutex<Vec<u64>>,
    /// Numbers of the drops that came, and how many of them find no answer.
    pub(crate) drops: Mutex<Vec<u32>>,
    pub(crate) drops_lost: AtomicU64,
    /// What it says as the meta group's leader, and how often it was asked as such.
    pub(crate) confirmed_routing: Mutex<Routing>,
    pub(crate) confirmed_asked: AtomicU64,
    /// What the next pulls and table creations are answered; those behind them are served.
    pub(crate) refusals: Mutex<VecDeque<ErrorDetail>>,
    /// When pulls and table creations came.
    pub(crate) asked_at: Mutex<Vec<Instant>>,
    pushes: Mutex<Option<mpsc::UnboundedSender<Push>>>,
}

impl State {
    /// Takes note of a pull or a table creation; what it is refused with.
    fn refusal(&self) -> Option<ErrorDetail> {
        self.asked_at.lock().push(Instant::now());
        self.refusals.lock().pop_front()
    }

    /// Rows of zeros of dim 1, or a refusal.
    fn pull(&self, pull: &PullRequest) -> Reply {
        if let Some(refusal) = self.refusal() {
            return Reply::Error(refusal);
        }
        let rows = Bytes::from(vec![0; pull.keys.len() / 8 * 4]);
        let rows_crc32 = crc32fast::hash(&rows);
        Reply::Pull(PullReply { index: 1, rows, rows_crc32, exists: Bytes::new(), changed: Bytes::new() })
    }
}

/// The node.
#[derive(Debug)]
pub(crate) struct FakeNode {
    pub(crate) address: String,
    pub(crate) state: Arc<State>,
    pushes: mpsc::UnboundedReceiver<Push>,
}

/// A push that waits for its answer.
#[derive(Debug)]
pub(crate) struct Push {
    pub(crate) session: u64,
    pub(crate) seq: u64,
    /// Empty when the body is.
    pub(crate) ids: Vec<u64>,
    request: u64,
    replies: mpsc::UnboundedSender<Result<ExchangeReply, Status>>,
}

impl Push {
    /// It is applied, at `index`; 0: it was before.
    pub(crate) fn apply(self, index: u64) {
        self.answer(Reply::Push(PushReply { index, ..Default::default() }));
    }

    pub(crate) fn fail(self, kind: ErrorKind) {
        self.fail_with(kind, ErrorDetail::default());
    }

    /// Out of order: `expected_seq` must come next.
    pub(crate) fn expect(self, expected_seq: u64) {
        self.fail_with(ErrorKind::OutOfOrder, ErrorDetail { expected_seq, ..Default::default() });
    }

    pub(crate) fn fail_with(self, kind: ErrorKind, detail: ErrorDetail) {
        let message = format!("the test says {kind:?}");
        self.answer(Reply::Error(ErrorDetail { kind: kind as i32, message, ..detail }));
    }

    fn answer(self, reply: Reply) {
        let _ = self.replies.send(Ok(ExchangeReply { id: self.request, reply: Some(reply) }));
    }
}

impl FakeNode {
    /// A node that nobody knows yet.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (sender, pushes) = mpsc::unbounded_channel();
        let state = Arc::new(State {
            lease_seconds: AtomicU32::new(60),
            pushes: Mutex::new(Some(sender)),
            ..State::default()
        });
        let service = Service(state.clone());
        let server = tonic::transport::Server::builder()
            .add_service(AdminServiceServer::new(service.clone()))
            .add_service(ParameterServiceServer::new(service));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        FakeNode { address, state, pushes }
    }

    /// The next push, which must be `seq` with content.
    pub(crate) async fn content(&mut self, seq: u64) -> Push {
        let push = self.next().await;
        assert_eq!((push.seq, push.ids.is_empty()), (seq, false), "{push:?}");
        push
    }

    /// The next push, which must be `seq` with an empty body.
    pub(crate) async fn empty(&mut self, seq: u64) -> Push {
        let push = self.next().await;
        assert_eq!((push.seq, push.ids.is_empty()), (seq, true), "{push:?}");
        push
    }

    pub(crate) async fn next(&mut self) -> Push {
        timeout(PATIENCE, self.pushes.recv()).await.expect("no push came").expect("the node runs")
    }

    /// Nothing comes for a while.
    pub(crate) async fn silence(&mut self) {
        let came = timeout(Duration::from_millis(400), self.pushes.recv()).await;
        assert!(came.is_err(), "{came:?}");
    }
}

/// What a node says when `leader` leads the only group, replicated on all of `nodes`, which are numbered from 1.
pub(crate) fn routing(nodes: &[&FakeNode], leader: u64) -> Routing {
    let numbers = 1..=nodes.len() as u64;
    let describe = |(id, node): (u64, &&FakeNode)| NodeDescription {
        id,
        address: node.address.clone(),
        state: "up".into(),
    };
    let shard = ShardDescription {
        group: GROUP,
        range_end: u64::MAX,
        replicas: numbers.clone().map(|node| ReplicaDescription { replica: node, node }).collect(),
        leader_node: leader,
        ..Default::default()
    };
    let nodes = numbers.zip(nodes).map(describe).collect();
    Routing { cluster_id: "fake".into(), version: 1, nodes, shards: vec![shard], ..Default::default() }
}

/// A client's table at the node(s) that say `routing` of themselves.
pub(crate) async fn table(nodes: &[&FakeNode], leader: u64, dim: u32, options: ClientOptions) -> Table {
    for node in nodes {
        *node.state.routing.lock() = routing(nodes, leader);
    }
    let client = Client::connect(&nodes[0].address, options).await.unwrap();
    client.create_table(definition::sparse("t", dim, definition::sgd(1.0))).await.unwrap()
}

/// One node, one table of dim 1, patient options.
pub(crate) async fn one_node() -> (FakeNode, Table) {
    let node = FakeNode::start().await;
    let options = ClientOptions { attempt_timeout: Duration::from_secs(60), ..ClientOptions::default() };
    let table = table(&[&node], 1, 1, options).await;
    (node, table)
}

/// Begins a push of one id to a table of dim 1.
pub(crate) async fn begin(table: &Table, id: u64) -> PushHandle {
    table.push_begin(&[id], &[1.0], PushOptions::default()).await.unwrap()
}

#[derive(Debug, Clone)]
struct Service(Arc<State>);

#[tonic::async_trait]
impl ParameterService for Service {
    type ExchangeStream = UnboundedReceiverStream<Result<ExchangeReply, Status>>;

    async fn exchange(
        &self,
        request: Request<Streaming<ExchangeRequest>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let (replies, stream) = mpsc::unbounded_channel();
        let pushes = self.0.pushes.lock().clone().expect("set at the start");
        let mut requests = request.into_inner();
        let state = self.0.clone();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let push = match request.request {
                    Some(Asked::Push(push)) => push,
                    Some(Asked::Pull(pull)) => {
                        let reply = ExchangeReply { id: request.id, reply: Some(state.pull(&pull)) };
                        let _ = replies.send(Ok(reply));
                        continue;
                    }
                    _ => continue,
                };
                assert_eq!(push.group, GROUP);
                let body = PushBody::parse(&push.body).unwrap();
                let mut ids = Vec::new();
                for section in body.sections() {
                    ids.extend(section.keys().map(|key| id_of(section.table, key)));
                }
                let (session, seq) = (body.session, body.seq);
                let push = Push { session, seq, ids, request: request.id, replies: replies.clone() };
                // The test may be over.
                let _ = pushes.send(push);
            }
        });
        Ok(Response::new(UnboundedReceiverStream::new(stream)))
    }

    async fn report_non_finite(
        &self,
        _: Request<NonFiniteReport>,
    ) -> Result<Response<NonFiniteReportReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn pull(&self, _: Request<PullRequest>) -> Result<Response<PullReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn push(&self, _: Request<PushRequest>) -> Result<Response<PushReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn push_pull(&self, _: Request<PushPullRequest>) -> Result<Response<PushPullReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }
}

#[tonic::async_trait]
impl AdminService for Service {
    async fn get_routing(&self, asked: Request<GetRoutingRequest>) -> Result<Response<Routing>, Status> {
        if asked.get_ref().confirmed {
            self.0.confirmed_asked.fetch_add(1, Ordering::SeqCst);
            return Ok(Response::new(self.0.confirmed_routing.lock().clone()));
        }
        Ok(Response::new(self.0.routing.lock().clone()))
    }

    async fn create_table(
        &self,
        request: Request<CreateTableRequest>,
    ) -> Result<Response<TableDescription>, Status> {
        if let Some(refusal) = self.0.refusal() {
            let details = refusal.encode_to_vec().into();
            return Err(Status::with_details(Code::ResourceExhausted, refusal.message, details));
        }
        let definition = request.into_inner().definition;
        Ok(Response::new(TableDescription { number: TABLE, definition, definition_version: 0 }))
    }

    async fn open_session(
        &self,
        _: Request<OpenSessionRequest>,
    ) -> Result<Response<OpenSessionReply>, Status> {
        let session = self.0.opened.fetch_add(1, Ordering::SeqCst) + 1;
        let lease_seconds = self.0.lease_seconds.load(Ordering::SeqCst);
        Ok(Response::new(OpenSessionReply { session, lease_seconds }))
    }

    async fn renew_session(
        &self,
        request: Request<RenewSessionRequest>,
    ) -> Result<Response<RenewSessionReply>, Status> {
        self.0.renewed.lock().push(request.into_inner().session);
        let lease_seconds = self.0.lease_seconds.load(Ordering::SeqCst);
        Ok(Response::new(RenewSessionReply { lease_seconds }))
    }

    async fn get_non_finite(
        &self,
        _: Request<GetNonFiniteRequest>,
    ) -> Result<Response<GetNonFiniteReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn init_cluster(
        &self,
        _: Request<InitClusterRequest>,
    ) -> Result<Response<InitClusterReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn drop_table(
        &self,
        request: Request<DropTableRequest>,
    ) -> Result<Response<DropTableReply>, Status> {
        let number = request.into_inner().number;
        self.0.drops.lock().push(number);
        let lose = |left: u64| left.checked_sub(1);
        if number != 0 && self.0.drops_lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose).is_ok() {
            return Err(Status::unavailable("the reply of a drop is lost"));
        }
        Ok(Response::new(DropTableReply { number: if number == 0 { TABLE } else { number } }))
    }

    async fn set_optimizer(
        &self,
        _: Request<SetOptimizerRequest>,
    ) -> Result<Response<TableDescription>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn get_node_status(
        &self,
        _: Request<GetNodeStatusRequest>,
    ) -> Result<Response<NodeStatus>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn scrub(&self, _: Request<ScrubRequest>) -> Result<Response<ScrubReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn transfer_leader(
        &self,
        _: Request<TransferLeaderRequest>,
    ) -> Result<Response<TransferLeaderReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn raise_version(
        &self,
        _: Request<RaiseVersionRequest>,
    ) -> Result<Response<RaiseVersionReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn unsafe_recover(
        &self,
        _: Request<UnsafeRecoverRequest>,
    ) -> Result<Response<UnsafeRecoverReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }
}
