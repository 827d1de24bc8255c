//! openraft's network, over a [`Transport`]: which lane each kind of message takes, and what its failures mean.
//!
//! Invariants:
//! - heartbeats, votes, pre-votes and transfers take the control lane, entries the log lane, snapshots their own;
//! - a peer that cannot be reached makes openraft back off; a refusal that passes by itself does not.
//!
//! Not here: connections (`peer_client`), what the receiver does (`router`).

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, Stream, StreamExt};
use openraft::OptionalSend;
use openraft::alias::SnapshotOf;
use openraft::base::{BoxFuture, BoxStream};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{Backoff, RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendError, StreamAppendResult,
    TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
};

use super::heartbeat::Question;
use super::pipeline::Pipeline;
use super::{FrameKind, Lane, Refusal, Target, Transport, TransportError, codec};
use crate::applier::SnapshotData;
use crate::options::{RaftLimits, RaftTiming};
use crate::snapshot::stream::SnapshotSender;
use crate::snapshot::traffic::SnapshotTraffic;
use crate::type_config::{Peer, Runtime, TypeConfig, Vote};

/// Before a receiver whose disk is full is asked again.
const NO_SPACE_PAUSE: Duration = Duration::from_secs(2);

/// Makes the network clients of one replica.
pub(crate) struct NetworkFactory<RT: Runtime> {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) group: u64,
    pub(crate) replica: u64,
    pub(crate) timing: RaftTiming,
    pub(crate) limits: RaftLimits,
    pub(crate) snapshots: Arc<SnapshotTraffic<RT>>,
}

/// One replica's way to another.
pub(crate) struct Network<RT: Runtime> {
    transport: Arc<dyn Transport>,
    sender: u64,
    target: Target,
    lane: Lane,
    timing: RaftTiming,
    limits: RaftLimits,
    snapshots: Arc<SnapshotTraffic<RT>>,
}

impl<RT: Runtime> NetworkFactory<RT> {
    fn client(&self, target: u64, peer: &Peer, lane: Lane) -> Network<RT> {
        Network {
            transport: Arc::clone(&self.transport),
            sender: self.replica,
            target: Target { peer: peer.clone(), group: self.group, replica: target },
            lane,
            timing: self.timing.clone(),
            limits: self.limits.clone(),
            snapshots: Arc::clone(&self.snapshots),
        }
    }
}

impl<RT: Runtime> RaftNetworkFactory<TypeConfig<RT>> for NetworkFactory<RT> {
    type Network = Network<RT>;

    async fn new_client(&mut self, target: u64, node: &Peer) -> Network<RT> {
        self.client(target, node, Lane::Log)
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &Peer) -> Network<RT> {
        self.client(target, node, Lane::Control)
    }

    async fn new_snapshot_client(&mut self, target: u64, node: &Peer) -> Network<RT> {
        self.client(target, node, Lane::Snapshot)
    }
}

impl<RT: Runtime> Network<RT> {
    fn control(&self, within: Duration) -> Question<'_> {
        Question {
            transport: &self.transport,
            sender: self.sender,
            target: &self.target,
            lane: Lane::Control,
            within,
        }
    }

    async fn exchange_append(
        &self,
        request: &AppendEntriesRequest<TypeConfig<RT>>,
        within: Duration,
    ) -> Result<StreamAppendResult<TypeConfig<RT>>, RPCError<TypeConfig<RT>>> {
        let question = Question { lane: self.lane, ..self.control(within) };
        question.ask(FrameKind::Append, codec::encode_append(request), codec::decode_append_reply).await
    }
}

impl<RT: Runtime> RaftNetworkV2<TypeConfig<RT>> for Network<RT> {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<TypeConfig<RT>>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig<RT>>, RPCError<TypeConfig<RT>>> {
        let result = self.exchange_append(&request, option.soft_ttl()).await?;
        Ok(match result {
            Ok(matching) => AppendEntriesResponse::PartialSuccess(matching),
            Err(StreamAppendError::Conflict(_)) => AppendEntriesResponse::Conflict,
            Err(StreamAppendError::HigherVote(vote)) => AppendEntriesResponse::HigherVote(vote),
        })
    }

    fn stream_append<'s, S>(
        &'s mut self,
        mut input: S,
        option: RPCOption,
    ) -> BoxFuture<
        's,
        Result<
            BoxStream<'s, Result<StreamAppendResult<TypeConfig<RT>>, RPCError<TypeConfig<RT>>>>,
            RPCError<TypeConfig<RT>>,
        >,
    >
    where
        S: Stream<Item = AppendEntriesRequest<TypeConfig<RT>>> + OptionalSend + Unpin + 'static,
    {
        async move {
            let stream: BoxStream<'s, _> = if self.lane == Lane::Log {
                Box::pin(Pipeline::<RT, S>::new(
                    input,
                    Arc::clone(&self.transport),
                    self.sender,
                    self.target.clone(),
                    self.limits.append_in_flight_bytes,
                    self.timing.append_timeout,
                ))
            } else {
                // A heartbeat: one request, answered within its interval or not at all.
                let within = option.hard_ttl();
                let this = &*self;
                let answers = async move {
                    let request = input.next().await?;
                    Some(this.exchange_append(&request, within).await)
                };
                Box::pin(answers.into_stream().filter_map(std::future::ready))
            };
            Ok(stream)
        }
        .boxed()
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig<RT>>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig<RT>>, RPCError<TypeConfig<RT>>> {
        let body = codec::encode_vote(&request);
        self.control(option.soft_ttl()).ask(FrameKind::Vote, body, codec::decode_vote_reply).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig<RT>>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig<RT>>, RPCError<TypeConfig<RT>>> {
        let body = codec::encode_vote(&request);
        self.control(option.soft_ttl()).ask(FrameKind::PreVote, body, codec::decode_vote_reply).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: SnapshotOf<TypeConfig<RT>, SnapshotData>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig<RT>>, StreamingError<TypeConfig<RT>>> {
        let SnapshotData::Virtual(source) = snapshot.snapshot else {
            return Err(StreamingError::Closed(ReplicationClosed::new(
                "only a virtual snapshot is ever sent",
            )));
        };
        let sender = SnapshotSender::<RT>::new(
            Arc::clone(&self.transport),
            self.target.clone(),
            vote,
            self.limits.clone(),
            Arc::clone(&self.snapshots),
        );
        let at_least = snapshot.meta.last_log_id.map_or(0, |last| last.index());
        let sending = Box::pin(async move {
            let sent = sender.send(source, at_least).await;
            if sent.as_ref().is_err_and(|error| error.is_no_space()) {
                RT::sleep(NO_SPACE_PAUSE).await;
            }
            sent
        });
        let cancelled = Box::pin(cancel);
        match futures_util::future::select(sending, cancelled).await {
            futures_util::future::Either::Left((sent, _)) => match sent {
                Ok(vote) => Ok(SnapshotResponse::new(vote)),
                Err(error) => {
                    tracing::warn!(
                        group = self.target.group,
                        replica = self.target.replica,
                        %error,
                        "a snapshot was not received"
                    );
                    // Unreachable makes openraft back off before it asks for the snapshot again.
                    Err(StreamingError::Unreachable(Unreachable::from_string(error)))
                }
            },
            futures_util::future::Either::Right((closed, _)) => Err(StreamingError::Closed(closed)),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig<RT>>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig<RT>>, RPCError<TypeConfig<RT>>> {
        let body = codec::encode_transfer(&request);
        // The reason why a target does not take over stays on its side: the leader only sees whether it did.
        self.control(option.hard_ttl()).ask(FrameKind::TransferLeader, body, codec::decode_done).await?;
        Ok(Ok(()))
    }

    fn backoff(&self) -> Option<Backoff> {
        let steps =
            (0u32..).map(|step| Duration::from_millis(20 << step.min(5)).min(Duration::from_millis(500)));
        Some(Backoff::new(steps))
    }
}

/// openraft's verdict for a failure of ours.
pub(crate) fn rpc_error<RT: Runtime>(error: TransportError) -> RPCError<TypeConfig<RT>> {
    let passes = matches!(
        &error,
        TransportError::Refused { refusal: Refusal::DoorShut | Refusal::Busy | Refusal::Superseded, .. }
    );
    if passes {
        RPCError::Network(NetworkError::from_string(error))
    } else {
        RPCError::Unreachable(Unreachable::from_string(error))
    }
}
