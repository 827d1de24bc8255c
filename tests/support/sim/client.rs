//! A simulated client: one session that pushes and pipelines, sends again what was not answered, and writes down what
//! the shard must hold once everything is answered.
//!
//! Invariants (of the real client, design 4, rule 3 and 14.6):
//! - sequence numbers have no gaps, and never come back with other content;
//! - what is unanswered is sent again, in order, under its old numbers, to whoever leads;
//! - no more than `WINDOW` messages are unanswered.
//!
//! Not here: what an answer should be by the log (`model`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use evershard_proto::key::key_of;
use evershard_proto::push_body::{Encoding, Operation, PushBodyBuilder};
use evershard_raft::{Group, Runtime};
use evershard_server::model::PushOutcome;
use openraft_rt_sim::SimRuntime;
use parking_lot::Mutex;

use super::model::{CELL_DIM, CELLS, CELLS_PER_SESSION, Rows, SUM_DIM, SUM_IDS, SUMS};
use super::oracle::{Oracle, Readers, check_leases};
use super::shard::Shard;
use super::sim_net::Dice;

const WINDOW: usize = 8;
const ROWS_A_PUSH: u64 = 40;

/// What everyone has pushed: the rows there must be when all of it is answered.
#[derive(Debug, Default)]
pub struct Ledger {
    pub rows: BTreeMap<u32, Rows>,
    /// The last sequence number by session.
    pub pushed: BTreeMap<u64, u64>,
    pub acknowledged: u64,
    /// Answers that said: that was applied before.
    pub repeated: u64,
    /// Clients that have nothing unanswered and push no more.
    pub finished: u64,
    /// Nothing new is pushed any more.
    pub closing: bool,
    /// Nothing is sent.
    pub paused: bool,
}

pub struct Client {
    pub session: u64,
    pub dice: Dice,
    pub readers: Readers<Shard>,
    pub oracle: Arc<Mutex<Oracle>>,
    pub ledger: Arc<Mutex<Ledger>>,
}

impl Client {
    /// Pushes until the ledger closes and everything is answered.
    pub async fn run(self) {
        let mut unanswered: VecDeque<(u64, Bytes)> = VecDeque::new();
        let mut next = 1;
        loop {
            SimRuntime::sleep(self.dice.micros(1_000, 60_000)).await;
            if self.ledger.lock().paused {
                continue;
            }
            while unanswered.len() < WINDOW && !self.dice.chance(3) {
                let mut ledger = self.ledger.lock();
                if ledger.closing {
                    break;
                }
                unanswered.push_back((next, self.message(next, &mut ledger)));
                next += 1;
            }
            if !unanswered.is_empty() {
                self.send(&mut unanswered).await;
            } else if self.ledger.lock().closing {
                self.ledger.lock().finished += 1;
                return;
            }
        }
    }

    /// Some gradients, some of them for one row twice, and maybe assignments or removals.
    fn message(&self, seq: u64, ledger: &mut Ledger) -> Bytes {
        let mut builder = PushBodyBuilder::new(0);
        let count = 1 + self.dice.below(ROWS_A_PUSH);
        let keys: Vec<u64> = (0..count).map(|_| key_of(SUMS, self.dice.below(SUM_IDS))).collect();
        let values: Vec<f32> = (0..keys.len() * SUM_DIM).map(|_| self.dice.below(9) as f32 - 4.0).collect();
        let payload = builder.section(SUMS, Operation::Gradient, Encoding::F32, SUM_DIM as u32, None, &keys);
        write(payload, &values);
        let sums = ledger.rows.entry(SUMS).or_default();
        for (key, gradient) in keys.iter().zip(values.chunks_exact(SUM_DIM)) {
            sums.descend(*key, gradient);
        }
        if self.dice.chance(2) {
            let cell = self.session * CELLS_PER_SESSION + self.dice.below(CELLS_PER_SESSION);
            let key = key_of(CELLS, cell);
            let cells = ledger.rows.entry(CELLS).or_default();
            if self.dice.chance(4) {
                builder.section(CELLS, Operation::Remove, Encoding::F32, CELL_DIM as u32, None, &[key]);
                cells.remove(key);
            } else {
                let value = [seq as f32];
                let payload =
                    builder.section(CELLS, Operation::Set, Encoding::F32, CELL_DIM as u32, None, &[key]);
                write(payload, &value);
                cells.set(key, &value);
            }
        }
        ledger.pushed.insert(self.session, seq);
        builder.finish(self.session, seq, 0)
    }

    /// Sends all that is unanswered, in order, to one node, and takes answers until one is missing.
    async fn send(&self, unanswered: &mut VecDeque<(u64, Bytes)>) {
        let Some((group, shard)) = self.leader() else { return };
        let term = group.leadership().term;
        let mut answers = Vec::new();
        for (_, body) in &*unanswered {
            let Some(answer) = shard.push(&group, body) else { break };
            answers.push(answer);
        }
        for answer in answers {
            let patience =
                self.dice.micros(20_000, [100_000, 300_000, 1_000_000][self.dice.below(3) as usize]);
            // The reply is lost, or its client does not wait for it.
            let is_lost = self.dice.chance(25);
            let answered = if is_lost { None } else { SimRuntime::timeout(patience, answer).await.ok() };
            let Some(Ok(reply)) = answered else {
                if answered.is_some() {
                    shard.unanswered(term, self.session);
                }
                return;
            };
            let outcome = PushOutcome::decode(&reply).expect("an outcome");
            if !self.take(outcome, unanswered) {
                return;
            }
            check_leases(&self.readers, &self.oracle);
        }
    }

    /// Takes the answer to the first of the unanswered; false when that has to be sent again.
    fn take(&self, outcome: PushOutcome, unanswered: &mut VecDeque<(u64, Bytes)>) -> bool {
        let (session, Some((seq, _))) = (self.session, unanswered.front()) else { return false };
        match outcome {
            PushOutcome::Applied { index } => {
                let mut ledger = self.ledger.lock();
                ledger.acknowledged += 1;
                ledger.repeated += u64::from(index == 0);
                self.oracle.lock().acknowledge(session << 32 | seq, index);
                unanswered.pop_front();
                true
            }
            // What is expected next is never what was answered already.
            PushOutcome::OutOfOrder { expected } if expected >= *seq => false,
            other => self.oracle.lock().violated(format!("session {session}, number {seq}: {other:?}")),
        }
    }

    /// A node that believes it leads.
    fn leader(&self) -> Option<(Group<SimRuntime>, Arc<Shard>)> {
        let readers = self.readers.lock();
        let mut leaders: Vec<_> =
            readers.values().filter(|(group, _)| group.leadership().is_self).cloned().collect();
        let count = leaders.len() as u64;
        (count > 0).then(|| leaders.swap_remove(self.dice.below(count) as usize))
    }
}

fn write(payload: &mut [u8], values: &[f32]) {
    for (place, value) in payload.chunks_exact_mut(4).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}
