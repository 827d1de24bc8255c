//! Where each key lives and who leads there, as this client last heard.
//!
//! Invariants:
//! - a refresh replaces the table only by one of the same cluster, of a recovery epoch not lower, and within an epoch of a
//!   version not older: what old nodes say that were given up while they were away is not believed;
//! - one round of questions is under way at a time, and nobody waits for it beyond his own deadline;
//! - a node that does not answer delays a round by [`HEAD_START`], and not by the time that it is given;
//! - a leader hint is used until it proves wrong, then dropped: the next try asks;
//! - a node that has just proved not to lead is asked last, and is not believed when it names itself: a leader that is cut
//!   off does not know it yet.
//!
//! Not here: sending.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{ErrorDetail, ErrorKind, GetRoutingRequest, Routing};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::{Mutex, RwLock};
use tokio::sync::oneshot;

use crate::Error;
use crate::acked::AckedIndexes;
use crate::backoff::Backoff;
use crate::error::detail_of;
use crate::node_channel::{NodeChannels, passing};

/// One node may take this long to say what it knows.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// A node that has not answered by then is not waited for any longer before the next one is asked too.
const HEAD_START: Duration = Duration::from_millis(50);

/// A node that failed or refused as a leader is doubted this long: about what an election takes, and then some.
const DOUBT: Duration = Duration::from_secs(3);

/// A follower that did not answer a read is not asked this long.
const AVOID: Duration = Duration::from_secs(1);

/// A shard, for sending to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) group: u64,
    pub(crate) range_start: u64,
    pub(crate) replicas: Vec<(u64, String)>,
}

/// The table of one version.
#[derive(Debug, Clone)]
pub(crate) struct RoutingTable {
    pub(crate) routing: Routing,
    /// Ascending by `range_start`; covers every key.
    pub(crate) shards: Vec<Shard>,
}

impl RoutingTable {
    fn new(routing: Routing) -> Result<Self, ErrorDetail> {
        let address =
            |node: u64| routing.nodes.iter().find(|n| n.id == node).map(|n| (node, n.address.clone()));
        let mut shards: Vec<Shard> = routing
            .shards
            .iter()
            .map(|s| Shard {
                group: s.group,
                range_start: s.range_start,
                replicas: s.replicas.iter().filter_map(|r| address(r.node)).collect(),
            })
            .collect();
        shards.sort_by_key(|s| s.range_start);
        if shards.first().is_none_or(|s| s.range_start != 0) {
            return Err(passing("the routing table does not cover every key".into()));
        }
        Ok(RoutingTable { routing, shards })
    }

    /// The position in `shards` of the owner of `key`.
    pub(crate) fn shard_of(&self, key: u64) -> usize {
        self.shards.partition_point(|s| s.range_start <= key) - 1
    }
}

type Refreshed = Result<Arc<RoutingTable>, ErrorDetail>;

/// The outcome of a round of questions, for all who wait for it.
type Round = Shared<BoxFuture<'static, Refreshed>>;

/// The cache.
#[derive(Debug)]
pub(crate) struct RoutingCache {
    seeds: Vec<String>,
    channels: Arc<NodeChannels>,
    table: RwLock<Option<Arc<RoutingTable>>>,
    leaders: Mutex<HashMap<u64, String>>,
    /// Who last proved not to lead a group, and when.
    doubted: Mutex<HashMap<u64, (String, Instant)>>,
    turn: Mutex<HashMap<u64, usize>>,
    /// Followers that did not answer a read, by group and address, and when that was.
    avoided: Mutex<HashMap<(u64, String), Instant>>,
    /// What bounded reads must show at least.
    pub(crate) acked: AckedIndexes,
    round: Mutex<Option<Round>>,
    admin: Mutex<HashMap<String, tonic::transport::Channel>>,
}

impl RoutingCache {
    pub(crate) fn new(seeds: Vec<String>, channels: Arc<NodeChannels>) -> Self {
        RoutingCache {
            seeds,
            channels,
            table: RwLock::new(None),
            leaders: Mutex::default(),
            doubted: Mutex::default(),
            turn: Mutex::default(),
            avoided: Mutex::default(),
            acked: AckedIndexes::default(),
            round: Mutex::default(),
            admin: Mutex::default(),
        }
    }

    /// The table, asked for when there is none yet.
    pub(crate) async fn table(self: &Arc<Self>, deadline: Instant) -> Result<Arc<RoutingTable>, Error> {
        if let Some(table) = self.table.read().clone() {
            return Ok(table);
        }
        self.refresh_until(deadline).await
    }

    /// What is known now.
    pub(crate) fn known(&self) -> Option<Arc<RoutingTable>> {
        self.table.read().clone()
    }

    /// Asks until some node answers.
    pub(crate) async fn refresh_until(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<Arc<RoutingTable>, Error> {
        let started = Instant::now();
        let mut backoff = Backoff::default();
        loop {
            let last = match self.refresh(deadline).await {
                Ok(table) => return Ok(table),
                Err(error) => error,
            };
            if last.kind() == ErrorKind::WrongCluster {
                return Err(Error::refused(ErrorKind::WrongCluster, last.message));
            }
            let pause = backoff.pause(last.retry_after_ms);
            if Instant::now() + pause >= deadline {
                return Err(Error::Unavailable {
                    operation: "ask for the routing table".into(),
                    tried: self.addresses(),
                    last: last.message,
                    elapsed: started.elapsed(),
                });
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// A table that a node told in a round of questions that ended after this was called, or why none did until `deadline`.
    pub(crate) async fn refresh(self: &Arc<Self>, deadline: Instant) -> Refreshed {
        let round = self.join_round();
        tokio::time::timeout_at(deadline.into(), round)
            .await
            .unwrap_or_else(|_| Err(passing("no node told the routing table in time".into())))
    }

    /// The round that is under way, or a new one.
    fn join_round(self: &Arc<Self>) -> Round {
        let mut under_way = self.round.lock();
        if let Some(round) = under_way.as_ref().filter(|round| round.peek().is_none()) {
            return round.clone();
        }
        let (told, outcome) = oneshot::channel();
        let cache = Arc::clone(self);
        // A task of its own: it goes on when the one who began it gives up.
        self.channels.spawn(async move {
            // Everybody may have stopped waiting.
            let _ = told.send(cache.ask_around().await);
        });
        let round = outcome.map(|told| told.unwrap_or_else(|_| Err(passing("the client is closed".into()))));
        let round = round.boxed().shared();
        *under_way = Some(round.clone());
        round
    }

    /// Asks the nodes, once each, the doubted ones last: the next one when one has failed, or has had its head start. The
    /// first table that is believed ends it.
    async fn ask_around(&self) -> Refreshed {
        let mut last: Option<ErrorDetail> = None;
        let mut addresses = self.addresses_by_trust().into_iter();
        let mut asked = FuturesUnordered::new();
        let mut ask_next = true;
        loop {
            if std::mem::take(&mut ask_next)
                && let Some(address) = addresses.next()
            {
                asked.push(async move {
                    self.ask(&address).await.and_then(|routing| self.adopt(routing, &address))
                });
            }
            let may_ask = addresses.len() > 0;
            let answer = tokio::select! {
                answer = asked.next() => answer,
                () = tokio::time::sleep(HEAD_START), if may_ask => {
                    ask_next = true;
                    continue;
                }
            };
            match answer {
                Some(Ok(table)) => return Ok(table),
                Some(Err(error)) => {
                    ask_next = true;
                    // Nodes of another cluster are the reason only when there are no others: ours may be down for a moment.
                    if last.as_ref().is_none_or(|last| last.kind() == ErrorKind::WrongCluster)
                        || error.kind() != ErrorKind::WrongCluster
                    {
                        last = Some(error);
                    }
                }
                None if may_ask => ask_next = true,
                None => return Err(last.unwrap_or_else(|| passing("no address".into()))),
            }
        }
    }

    /// What everything is asked under.
    pub(crate) fn recovery_epoch(&self) -> u64 {
        self.channels.recovery_epoch()
    }

    /// Takes in an answer that may say OTHER_RECOVERY. True when the node has heard of more than we: from now on everything is
    /// asked under its epoch. One that has heard of less is no one to ask now.
    pub(crate) fn hear_of_recovery(&self, detail: &ErrorDetail) -> bool {
        let has_risen = detail.kind() == ErrorKind::OtherRecovery
            && self.channels.raise_recovery_epoch(detail.recovery_epoch);
        if has_risen {
            self.forget_leaders(detail.recovery_epoch);
        }
        has_risen
    }

    /// Who led before a recovery says nothing of who leads after it.
    fn forget_leaders(&self, epoch: u64) {
        tracing::warn!(epoch, "the cluster went through an unsafe recovery");
        self.leaders.lock().clear();
        self.doubted.lock().clear();
        self.acked.forget();
    }

    fn addresses_by_trust(&self) -> Vec<String> {
        let mut addresses = self.addresses();
        let doubted = self.doubted.lock();
        let is_doubted = |address: &String| {
            doubted.values().any(|(wrong, since)| wrong == address && since.elapsed() < DOUBT)
        };
        addresses.sort_by_cached_key(is_doubted);
        addresses
    }

    async fn ask(&self, address: &str) -> Result<Routing, ErrorDetail> {
        let mut client = crate::admin::client(self.unary_channel(address)?, self.recovery_epoch());
        match tokio::time::timeout(ASK_TIMEOUT, client.get_routing(GetRoutingRequest::default())).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => {
                let mut detail = detail_of(&status);
                detail.message = format!("{address}: {}", detail.message);
                Err(detail)
            }
            Err(_) => Err(passing(format!("{address}: no answer within {ASK_TIMEOUT:?}"))),
        }
    }

    /// Takes in what the meta group's leader knows.
    ///
    /// # Errors
    /// [`Error::Refused`] with WRONG_CLUSTER, [`Error::Unavailable`] for a table that cannot be used now.
    pub(crate) fn adopt_confirmed(&self, routing: Routing) -> Result<Arc<RoutingTable>, Error> {
        const LEADER: &str = "the meta group's leader";
        self.adopt(routing, LEADER).map_err(|detail| match detail.kind() {
            ErrorKind::WrongCluster => Error::refused(detail.kind(), detail.message),
            _ => Error::Unavailable {
                operation: "ask for the routing table".into(),
                tried: vec![LEADER.into()],
                last: detail.message,
                elapsed: Duration::ZERO,
            },
        })
    }

    /// Takes in what the node at `from` knows.
    fn adopt(&self, routing: Routing, from: &str) -> Result<Arc<RoutingTable>, ErrorDetail> {
        let mut known = self.table.write();
        if let Some(old) = known.as_ref()
            && old.routing.cluster_id != routing.cluster_id
        {
            let message = format!(
                "{from} belongs to cluster {}, this client to cluster {}",
                routing.cluster_id, old.routing.cluster_id
            );
            return Err(ErrorDetail { kind: ErrorKind::WrongCluster as i32, message, ..Default::default() });
        }
        let epoch = routing.recovery_epoch;
        if epoch < self.recovery_epoch() {
            return Err(passing(format!(
                "{from} has not heard of an unsafe recovery of the cluster: it is of recovery epoch {epoch}, this client of {}",
                self.recovery_epoch()
            )));
        }
        if self.channels.raise_recovery_epoch(epoch) {
            self.forget_leaders(epoch);
        }
        self.adopt_leaders(&routing, from);
        if let Some(old) = known.as_ref()
            && (old.routing.recovery_epoch, old.routing.version) > (epoch, routing.version)
        {
            return Ok(old.clone());
        }
        let table = Arc::new(RoutingTable::new(routing)?);
        *known = Some(table.clone());
        Ok(table)
    }

    fn adopt_leaders(&self, routing: &Routing, from: &str) {
        let mut leaders = self.leaders.lock();
        let doubted = self.doubted.lock();
        for shard in &routing.shards {
            let node = routing.nodes.iter().find(|n| n.id == shard.leader_node && n.state != "down");
            let Some(node) = node else { continue };
            let names_itself_again = node.address == from
                && doubted
                    .get(&shard.group)
                    .is_some_and(|(wrong, since)| wrong == from && since.elapsed() < DOUBT);
            // With no leader known the replicas are tried in turn, this one among them: if it leads after all, that shows.
            if !names_itself_again {
                leaders.insert(shard.group, node.address.clone());
            }
        }
    }

    /// Nodes to ask: those of the table, then those the user gave.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let mut all: Vec<String> =
            self.known().map_or(Vec::new(), |t| t.routing.nodes.iter().map(|n| n.address.clone()).collect());
        for seed in &self.seeds {
            if !all.contains(seed) {
                all.push(seed.clone());
            }
        }
        all
    }

    /// Where to send what is for `group`'s leader: the leader when known, else its replicas in turn.
    pub(crate) fn leader(&self, group: u64) -> Option<String> {
        if let Some(address) = self.leaders.lock().get(&group) {
            return Some(address.clone());
        }
        let table = self.known()?;
        let shard = table.shards.iter().find(|s| s.group == group)?;
        let mut turns = self.turn.lock();
        let turn = turns.entry(group).or_insert(0);
        *turn = turn.wrapping_add(1);
        shard.replicas.get(*turn % shard.replicas.len().max(1)).map(|(_, address)| address.clone())
    }

    /// Whom to ask what a follower may answer, one after the other: another one first each time.
    pub(crate) fn followers(&self, group: u64) -> Vec<String> {
        let Some(table) = self.known() else { return Vec::new() };
        let Some(shard) = table.shards.iter().find(|s| s.group == group) else { return Vec::new() };
        let leader = self.leaders.lock().get(&group).cloned();
        let mut avoided = self.avoided.lock();
        avoided.retain(|_, since| since.elapsed() < AVOID);
        let mut followers: Vec<String> = shard
            .replicas
            .iter()
            .map(|(_, address)| address)
            .filter(|address| Some(*address) != leader.as_ref())
            .filter(|address| !avoided.contains_key(&(group, (*address).clone())))
            .cloned()
            .collect();
        if !followers.is_empty() {
            let mut turns = self.turn.lock();
            let turn = turns.entry(group).or_insert(0);
            *turn = turn.wrapping_add(1);
            let first = *turn % followers.len();
            followers.rotate_left(first);
        }
        followers
    }

    /// A follower did not answer a read.
    pub(crate) fn avoid(&self, group: u64, address: &str) {
        self.avoided.lock().insert((group, address.to_owned()), Instant::now());
    }

    /// Where a node is.
    pub(crate) fn address_of(&self, node: u64) -> Option<String> {
        self.known()?.routing.nodes.iter().find(|n| n.id == node).map(|n| n.address.clone())
    }

    /// What an answer said of the leader. `None`: the one at `wrong` is it not.
    pub(crate) fn hint(&self, group: u64, wrong: &str, leader: Option<&str>) {
        let mut leaders = self.leaders.lock();
        if !wrong.is_empty() {
            self.doubted.lock().insert(group, (wrong.to_string(), Instant::now()));
        }
        match leader.filter(|l| !l.is_empty() && *l != wrong) {
            Some(leader) => {
                leaders.insert(group, leader.to_string());
            }
            None => {
                if leaders.get(&group).is_some_and(|known| known == wrong) {
                    leaders.remove(&group);
                }
            }
        }
    }

    /// A channel for unary calls to a node.
    pub(crate) fn unary_channel(&self, address: &str) -> Result<tonic::transport::Channel, ErrorDetail> {
        let mut channels = self.admin.lock();
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = self.channels.endpoint(address)?.connect_lazy();
        channels.insert(address.to_string(), channel.clone());
        Ok(channel)
    }
}

/// A table of equal shards, for tests of other modules.
#[cfg(test)]
pub(crate) fn table_for_tests(shards: u64) -> RoutingTable {
    RoutingTable::new(crate::batch::tests::routing(shards)).expect("covers all")
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::{NodeDescription, ReplicaDescription, ShardDescription};
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    /// Two nodes that both name themselves as the leader of group 1.
    fn says(leader: u64) -> Routing {
        let node = |id| NodeDescription { id, address: format!("http://n:{id}"), state: "up".into() };
        let replica = |node| ReplicaDescription { node, ..Default::default() };
        let shard = ShardDescription {
            group: 1,
            range_end: u64::MAX,
            replicas: vec![replica(1), replica(2)],
            leader_node: leader,
            ..Default::default()
        };
        Routing { nodes: vec![node(1), node(2)], shards: vec![shard], ..Default::default() }
    }

    #[test]
    fn a_node_that_refused_to_lead_is_asked_last_and_not_believed_of_itself() {
        let channels = NodeChannels::new(ASK_TIMEOUT, TaskTracker::new(), CancellationToken::new());
        let cache = RoutingCache::new(vec!["http://n:1".into()], channels);
        let (one, two) = ("http://n:1", "http://n:2");
        cache.adopt(says(1), one).expect("covers all");
        assert_eq!(cache.leader(1).as_deref(), Some(one));
        assert_eq!(cache.addresses_by_trust(), [one, two]);
        cache.hint(1, one, None);
        assert_eq!(cache.addresses_by_trust(), [two, one]);
        cache.adopt(says(1), one).expect("covers all");
        let in_turn: Vec<_> = (0..2).filter_map(|_| cache.leader(1)).collect();
        assert!(in_turn.iter().any(|a| a == one) && in_turn.iter().any(|a| a == two), "{in_turn:?}");
        cache.adopt(says(2), two).expect("covers all");
        assert_eq!(cache.leader(1).as_deref(), Some(two));
        // Another node may name it: it may lead again.
        cache.adopt(says(1), two).expect("covers all");
        assert_eq!(cache.leader(1).as_deref(), Some(one));
    }

    #[test]
    fn followers_take_turns_and_one_that_failed_is_left_alone() {
        let channels = NodeChannels::new(ASK_TIMEOUT, TaskTracker::new(), CancellationToken::new());
        let cache = RoutingCache::new(vec!["http://n:1".into()], channels);
        let (one, two) = ("http://n:1", "http://n:2");
        cache.adopt(says(1), one).expect("covers all");
        assert_eq!(cache.followers(1), [two], "not the leader");
        cache.avoid(1, two);
        assert_eq!(cache.followers(1), Vec::<String>::new());
        assert_eq!(cache.followers(2), Vec::<String>::new(), "no such group");
        cache.hint(1, one, None);
        assert_eq!(cache.followers(1), [one], "nobody is known to lead");
        cache.avoided.lock().clear();
        let first: Vec<String> = (0..2).map(|_| cache.followers(1)[0].clone()).collect();
        assert!(first.contains(&one.to_owned()) && first.contains(&two.to_owned()), "{first:?}");
    }

    #[test]
    fn a_table_of_a_history_that_was_given_up_is_not_believed() {
        let channels = NodeChannels::new(ASK_TIMEOUT, TaskTracker::new(), CancellationToken::new());
        let cache = RoutingCache::new(vec!["http://n:1".into()], channels);
        let (one, two) = ("http://n:1", "http://n:2");
        let of = |recovery_epoch, version, leader| Routing { recovery_epoch, version, ..says(leader) };
        cache.adopt(of(0, 9, 1), one).expect("covers all");
        // Of a newer epoch, and yet of a lower version: the old history went on without it.
        let table = cache.adopt(of(2, 4, 2), two).expect("newer");
        assert_eq!((table.routing.recovery_epoch, table.routing.version), (2, 4));
        assert_eq!((cache.recovery_epoch(), cache.leader(1).as_deref()), (2, Some(two)));
        let refused = cache.adopt(of(0, 10, 1), one).expect_err("given up");
        assert!(refused.message.contains("unsafe recovery"), "{refused:?}");
        assert_eq!(cache.leader(1).as_deref(), Some(two), "its leaders are not believed either");
        // An answer to a push may tell of it before any table does.
        let heard = |recovery_epoch| {
            let kind = ErrorKind::OtherRecovery as i32;
            cache.hear_of_recovery(&ErrorDetail { kind, recovery_epoch, ..Default::default() })
        };
        assert!(!heard(0), "that node has not heard");
        assert!(heard(3));
        assert!(cache.adopt(of(2, 5, 2), two).is_err());
    }

    /// A node that takes connections and never says a word.
    fn hung() -> (std::net::TcpListener, String) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        (listener, address)
    }

    #[tokio::test]
    async fn nobody_waits_for_hung_nodes_beyond_his_deadline_or_behind_others() {
        const PATIENCE: Duration = Duration::from_secs(10);
        let nodes = [hung(), hung()];
        let seeds = nodes.iter().map(|(_, address)| address.clone()).collect();
        let channels = NodeChannels::new(ASK_TIMEOUT, TaskTracker::new(), CancellationToken::new());
        let cache = Arc::new(RoutingCache::new(seeds, channels));
        let lanes = (0..24).map(|_| cache.refresh(Instant::now() + Duration::from_millis(100)));
        let asked = tokio::time::timeout(PATIENCE, futures_util::future::join_all(lanes)).await;
        let asked = asked.expect("one after the other they would wait for 48 s");
        assert!(asked.iter().all(Result::is_err), "{asked:?}");
        // A patient one is under way, and an impatient one does not wait for what it waits for.
        let mut patient = std::pin::pin!(cache.refresh(Instant::now() + PATIENCE));
        let impatient = cache.refresh(Instant::now() + ASK_TIMEOUT / 20);
        tokio::select! {
            biased;
            told = &mut patient => panic!("the round ended first: {told:?}"),
            told = impatient => assert!(told.is_err(), "{told:?}"),
        }
    }

    #[test]
    fn every_key_has_an_owner() {
        let shard = |group, range_start, range_end| ShardDescription {
            group,
            range_start,
            range_end,
            ..Default::default()
        };
        let routing = Routing {
            shards: vec![shard(2, 1 << 63, u64::MAX), shard(1, 0, (1 << 63) - 1)],
            ..Default::default()
        };
        let table = RoutingTable::new(routing).expect("covers all");
        let group = |key| table.shards[table.shard_of(key)].group;
        assert_eq!([0, (1 << 63) - 1, 1 << 63, u64::MAX].map(group), [1, 1, 2, 2]);
    }
}
