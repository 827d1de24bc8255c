//! The lane of one group.
//!
//! Invariants:
//! - numbers have no gaps: a message gets its number when it is first sent, and keeps it;
//! - a number's content never changes to other content that could be applied: a refused message leaves an empty body;
//! - after any failure everything unacknowledged is sent again, in order, to whoever leads then;
//! - a message is settled exactly once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use evershard_proto::push_body::PushBodyBuilder;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{ErrorDetail, ErrorKind, PushRequest};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;

use super::LaneContext;
use super::message::{Control, Message, ParkedPush, Settled, Submission};
use crate::Refusal;
use crate::backoff::Backoff;
use crate::error::is_passing;
use crate::node_channel::passing;

const CONTROL_MAX: usize = 256;

/// One try of one message.
struct Attempt {
    seq: u64,
    epoch: u64,
    address: String,
    result: Result<Reply, ErrorDetail>,
}

pub(super) struct Lane {
    group: u64,
    context: Arc<LaneContext>,
    submissions: mpsc::Receiver<Submission>,
    control: mpsc::Receiver<Control>,
    control_sender: mpsc::Sender<Control>,
    waiting: VecDeque<Submission>,
    session: Option<u64>,
    gave_up: bool,
    next_seq: u64,
    unacked: VecDeque<Message>,
    /// Parked messages that were settled since, by (session, seq).
    settled: HashMap<(u64, u64), Settled>,
    /// Grows with every new round of sending: failures of older rounds are old news.
    epoch: u64,
    resend_at: Option<Instant>,
    refresh: bool,
    backoff: Backoff,
    attempts: FuturesUnordered<BoxFuture<'static, Attempt>>,
}

impl Lane {
    pub(super) fn new(
        group: u64,
        context: Arc<LaneContext>,
        submissions: mpsc::Receiver<Submission>,
    ) -> Self {
        let (control_sender, control) = mpsc::channel(CONTROL_MAX);
        Lane {
            group,
            context,
            submissions,
            control,
            control_sender,
            waiting: VecDeque::new(),
            session: None,
            gave_up: false,
            next_seq: 1,
            unacked: VecDeque::new(),
            settled: HashMap::new(),
            epoch: 0,
            resend_at: None,
            refresh: false,
            backoff: Backoff::default(),
            attempts: FuturesUnordered::new(),
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            let deadline = self.next_deadline();
            tokio::select! {
                biased;
                Some(attempt) = self.attempts.next(), if !self.attempts.is_empty() => self.hear(attempt),
                Some(control) = self.control.recv() => self.obey(control),
                submission = self.submissions.recv() => match submission {
                    Some(submission) => self.waiting.push_back(submission),
                    None if self.unacked.is_empty() && self.waiting.is_empty() => return,
                    // Nobody can submit any more, and yet somebody waits: until they are settled.
                    None => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
                },
                () = sleep_until(deadline), if deadline.is_some() => self.expire(),
                () = sleep_until(self.resend_at), if self.resend_at.is_some() => self.resend().await,
            }
            while self.resend_at.is_none() && self.unacked.len() < self.context.options.pushes_in_flight {
                let Some(submission) = self.waiting.pop_front() else { break };
                self.begin(submission).await;
            }
        }
    }

    /// Numbers a message and sends it for the first time.
    async fn begin(&mut self, submission: Submission) {
        let Submission { builder, clock, rows, deadline, done, permit } = submission;
        let session = match self.session {
            Some(session) => session,
            None => {
                let opened = if self.gave_up {
                    self.context.sessions.open(deadline).await
                } else {
                    self.context.sessions.shared(deadline).await
                };
                match opened {
                    Ok(session) => {
                        self.session = Some(session);
                        self.next_seq = 1;
                        session
                    }
                    Err(error) => {
                        let _ = done.send(Settled::Unsent(error.to_string()));
                        return;
                    }
                }
            }
        };
        let seq = self.next_seq;
        self.next_seq += 1;
        let message = Message {
            seq,
            body: builder.finish(session, seq, clock),
            rows,
            waiter: Some((deadline, done)),
            attempts: 0,
            refusal: None,
            last: String::from("no answer yet"),
            _permit: permit,
        };
        self.unacked.push_back(message);
        self.send(self.unacked.len() - 1).await;
    }

    async fn send(&mut self, at: usize) {
        let Some(address) = self.context.routing.leader(self.group) else {
            self.again(passing(format!("no replica of group {} is known", self.group)), "");
            return;
        };
        let message = &mut self.unacked[at];
        if message.refusal.is_none() {
            message.attempts += 1;
        }
        let (seq, epoch) = (message.seq, self.epoch);
        let request = Request::Push(PushRequest { group: self.group, body: message.body.clone() });
        let pending = self.context.channels.send(&address, request).await;
        let within = self.context.options.attempt_timeout;
        self.attempts.push(Box::pin(async move {
            let result = match tokio::time::timeout(within, pending).await {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => Err(passing(format!("{address}: the connection broke"))),
                Err(_) => Err(passing(format!("{address}: no answer within {within:?}"))),
            };
            Attempt { seq, epoch, address, result }
        }));
    }

    /// Takes in what became of a try.
    fn hear(&mut self, attempt: Attempt) {
        let Some(at) = self.unacked.iter().position(|m| m.seq == attempt.seq) else { return };
        let detail = match attempt.result {
            Ok(Reply::Push(reply)) => {
                self.backoff.reset();
                self.acknowledge(at, reply.index);
                return;
            }
            Ok(_) => passing(format!("{}: an answer to another question", attempt.address)),
            Err(detail) => detail,
        };
        let kind = detail.kind();
        self.unacked[at].last.clone_from(&detail.message);
        match kind {
            ErrorKind::SessionExpired => self.end_session(&detail.message),
            ErrorKind::OutOfOrder
                if detail.expected_seq < self.unacked[0].seq && attempt.epoch == self.epoch =>
            {
                let what = format!(
                    "group {} expects number {} of the session, older than all that is unacknowledged here",
                    self.group, detail.expected_seq
                );
                self.end_session(&what);
            }
            // A damaged message is sent again as it is.
            _ if is_passing(kind) || kind == ErrorKind::Corrupt => {
                if attempt.epoch == self.epoch {
                    self.again(detail, &attempt.address);
                }
            }
            _ => self.refuse(at, Refusal { kind, message: detail.message }),
        }
    }

    fn acknowledge(&mut self, at: usize, index: u64) {
        let Some(message) = self.unacked.remove(at) else { return };
        let settled = match &message.refusal {
            // An empty body that was answered from the session table: its number's content is in the log already, so
            // an earlier try had gone through before the refusal.
            Some(_) if index == 0 && message.attempts > 1 => Settled::Applied,
            Some(refusal) => Settled::Refused(refusal.clone()),
            None => Settled::Applied,
        };
        if matches!(settled, Settled::Applied) {
            self.context.stats.acked(message.rows);
        }
        self.settle(message, settled);
    }

    /// A refused message's number is used up by an empty body; what was sent behind it is sent again.
    fn refuse(&mut self, at: usize, refusal: Refusal) {
        if self.unacked[at].refusal.is_some() {
            // Recorded: the number was used up by the refused message itself.
            if let Some(message) = self.unacked.remove(at) {
                let refusal = message.refusal.clone().unwrap_or(refusal);
                self.settle(message, Settled::Refused(refusal));
            }
            return;
        }
        let Some(session) = self.session else { return };
        let message = &mut self.unacked[at];
        message.body = PushBodyBuilder::new(0).finish(session, message.seq, 0);
        message.refusal = Some(refusal);
        self.epoch += 1;
        self.resend_at = Some(Instant::now());
    }

    fn settle(&mut self, message: Message, settled: Settled) {
        match message.waiter {
            // Whoever waited may have gone away.
            Some((_, done)) => drop(done.send(settled)),
            None => {
                if let Some(session) = self.session {
                    self.settled.insert((session, message.seq), settled);
                }
            }
        }
    }

    /// Everything unacknowledged is sent again after a pause.
    fn again(&mut self, detail: ErrorDetail, address: &str) {
        self.context.stats.retried();
        self.epoch += 1;
        if detail.kind() != ErrorKind::Exhausted && detail.kind() != ErrorKind::OutOfOrder {
            self.context.routing.hint(self.group, address, Some(&detail.leader_address));
            self.refresh |= detail.leader_address.is_empty();
        }
        self.resend_at = Some(Instant::now() + self.backoff.pause(detail.retry_after_ms));
    }

    async fn resend(&mut self) {
        self.resend_at = None;
        if std::mem::take(&mut self.refresh) {
            // Nobody answering is found out by sending.
            let _ = self.context.routing.refresh().await;
        }
        for at in 0..self.unacked.len() {
            self.send(at).await;
            if self.resend_at.is_some() {
                return;
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let unacked = self.unacked.iter().filter_map(|m| m.waiter.as_ref().map(|(deadline, _)| *deadline));
        unacked.chain(self.waiting.iter().map(|s| s.deadline)).min()
    }

    /// Messages whose deadline is over: unsent ones are failed, sent ones parked.
    fn expire(&mut self) {
        let now = Instant::now();
        let (over, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|s| s.deadline <= now);
        self.waiting = waiting.into();
        for submission in over {
            let _ = submission
                .done
                .send(Settled::Unsent("it waited for earlier pushes until its deadline".into()));
        }
        let session = self.session.unwrap_or(0);
        for message in &mut self.unacked {
            let Some((deadline, done)) = message.waiter.take() else { continue };
            if deadline > now {
                message.waiter = Some((deadline, done));
                continue;
            }
            let parked = ParkedPush {
                session,
                seq: message.seq,
                control: Some(self.control_sender.clone()),
                cause: message.last.clone(),
            };
            // With nobody to take it, the token is dropped here and gives the message up.
            drop(done.send(Settled::Parked(parked)));
        }
    }

    fn obey(&mut self, control: Control) {
        match control {
            Control::Retry { session, seq, deadline, done } => {
                if let Some(settled) = self.settled.remove(&(session, seq)) {
                    let _ = done.send(settled);
                } else if let Some(message) =
                    self.unacked.iter_mut().find(|m| m.seq == seq && Some(session) == self.session)
                {
                    message.waiter = Some((deadline, done));
                } else {
                    let _ = done.send(Settled::Expired("the session of this push has ended".into()));
                }
            }
            Control::GiveUp { session, seq } => {
                if self.settled.remove(&(session, seq)).is_some() || Some(session) != self.session {
                    return;
                }
                if self.unacked.iter().any(|m| m.seq == seq && m.waiter.is_none()) {
                    self.end_session("an earlier push to this shard was given up without an answer");
                }
            }
        }
    }

    /// The session ends on this shard: what was sent stays unknown, what was not sent goes under a new session.
    fn end_session(&mut self, cause: &str) {
        tracing::warn!(group = self.group, cause, unacknowledged = self.unacked.len(), "a push session ends");
        for message in std::mem::take(&mut self.unacked) {
            let settled = match &message.refusal {
                Some(refusal) if message.attempts <= 1 => Settled::Refused(refusal.clone()),
                _ => Settled::Expired(format!("the outcome of the push is unknown: {cause}")),
            };
            self.settle(message, settled);
        }
        self.session = None;
        self.gave_up = true;
        self.epoch += 1;
        self.resend_at = None;
        self.attempts = FuturesUnordered::new();
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
