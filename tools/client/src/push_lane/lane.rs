//! The lane of one group.
//!
//! Invariants:
//! - numbers have no gaps: a message gets its number when it is first sent, and keeps it;
//! - a number's content never changes to other content that could be applied: a refused message leaves an empty body;
//! - the unacknowledged numbers span less than the results a server keeps: an answer that is asked for again is still there;
//! - an answer is judged by the body it answers (`verdict`);
//! - after any failure everything unacknowledged is sent again, in order, to whoever leads then;
//! - a message is settled exactly once.
//!
//! A result that a server does not keep any more (FORGOTTEN) leaves that one message unknown. Its number is used up, so the
//! session goes on; only what leaves a number open ends it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use evershard_proto::limits::PUSHES_IN_FLIGHT_MAX;
use evershard_proto::push_body::PushBodyBuilder;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{ErrorDetail, ErrorKind, PushRequest};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;

use super::LaneContext;
use super::message::{Control, Message, ParkedPush, Settled, Submission};
use super::verdict::{Sent, Verdict};
use crate::Refusal;
use crate::backoff::Backoff;
use crate::node_channel::passing;

/// Answers that settle nothing and should not happen, until a message is taken back: a body that no server finds whole must
/// not stop its lane for ever.
const FAILURES_MAX: u32 = 8;

/// One try of one message.
struct Attempt {
    seq: u64,
    epoch: u64,
    /// It carried the empty body, not the content.
    empty: bool,
    /// The lowest unacknowledged number when it was sent.
    first_unacked: u64,
    address: String,
    result: Result<Reply, ErrorDetail>,
}

pub(super) struct Lane {
    group: u64,
    context: Arc<LaneContext>,
    submissions: mpsc::Receiver<Submission>,
    control: mpsc::UnboundedReceiver<Control>,
    control_sender: mpsc::UnboundedSender<Control>,
    waiting: VecDeque<Submission>,
    session: Option<u64>,
    gave_up: bool,
    next_seq: u64,
    unacked: VecDeque<Message>,
    /// Parked messages that were settled since, by (session, seq): until their tokens ask, or are dropped.
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
        let (control_sender, control) = mpsc::unbounded_channel();
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
            while self.resend_at.is_none() && self.has_room() {
                let Some(submission) = self.waiting.pop_front() else { break };
                self.begin(submission).await;
            }
        }
    }

    /// Whether another message may be sent: few are unacknowledged, and the oldest one's result would still be kept.
    fn has_room(&self) -> bool {
        let in_span = |oldest: &Message| self.next_seq - oldest.seq < PUSHES_IN_FLIGHT_MAX as u64;
        self.unacked.len() < self.context.options.pushes_in_flight && self.unacked.front().is_none_or(in_span)
    }

    /// Numbers a message and sends it for the first time.
    async fn begin(&mut self, submission: Submission) {
        let session = match self.session {
            Some(session) => session,
            None => {
                let opened = if self.gave_up {
                    self.context.sessions.open(submission.deadline).await
                } else {
                    self.context.sessions.shared(submission.deadline).await
                };
                match opened {
                    Ok(session) => {
                        self.session = Some(session);
                        self.next_seq = 1;
                        session
                    }
                    Err(error) => return submission.return_unsent(error.to_string()),
                }
            }
        };
        let seq = self.next_seq;
        self.next_seq += 1;
        let Submission { content, deadline, done, permit } = submission;
        let message = Message {
            seq,
            body: content.builder.finish(session, seq, content.clock),
            rows: content.rows,
            waiter: Some((deadline, done)),
            attempts: 0,
            failures: 0,
            refusal: None,
            last: String::from("no answer yet"),
            permit: Some(permit),
        };
        self.unacked.push_back(message);
        self.send(self.unacked.len() - 1).await;
    }

    async fn send(&mut self, at: usize) {
        let Some(address) = self.context.routing.leader(self.group) else {
            self.again(&passing(format!("no replica of group {} is known", self.group)), "");
            return;
        };
        let (epoch, first_unacked) = (self.epoch, self.unacked[0].seq);
        let message = &mut self.unacked[at];
        let (seq, empty) = (message.seq, message.refusal.is_some());
        message.attempts += u32::from(!empty);
        let request = Request::Push(PushRequest { group: self.group, body: message.body.clone() });
        let pending = self.context.channels.send(&address, request).await;
        let within = self.context.options.attempt_timeout;
        self.attempts.push(Box::pin(async move {
            let result = match tokio::time::timeout(within, pending).await {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => Err(passing(format!("{address}: the connection broke"))),
                Err(_) => Err(passing(format!("{address}: no answer within {within:?}"))),
            };
            Attempt { seq, epoch, empty, first_unacked, address, result }
        }));
    }

    /// Takes in what became of a try.
    fn hear(&mut self, attempt: Attempt) {
        let Some(at) = self.unacked.iter().position(|m| m.seq == attempt.seq) else { return };
        let detail = match attempt.result {
            // Whichever body it answers: an empty one is answered so only when the content was applied before.
            Ok(Reply::Push(reply)) => {
                self.backoff.reset();
                self.context.routing.acked.note(self.group, reply.index, reply.applied_index);
                self.context.stats.acked(self.unacked[at].rows);
                return self.settle_at(at, Settled::Applied);
            }
            Ok(_) => passing(format!("{}: an answer to another question", attempt.address)),
            Err(detail) => detail,
        };
        let emptied = self.unacked[at].refusal.is_some();
        let sent = Sent { empty: attempt.empty, emptied, first_unacked: attempt.first_unacked };
        let verdict = Verdict::of(&detail, sent);
        if verdict != Verdict::Ignore {
            self.unacked[at].last.clone_from(&detail.message);
        }
        let is_current = attempt.epoch == self.epoch;
        match verdict {
            Verdict::Ignore => {}
            Verdict::Again if is_current => self.again(&detail, &attempt.address),
            Verdict::Again => {}
            Verdict::Failed => {
                self.unacked[at].failures += 1;
                if self.unacked[at].failures < FAILURES_MAX {
                    if is_current {
                        self.again(&detail, &attempt.address);
                    }
                } else if emptied {
                    // Nobody takes the number, and nothing can pass it.
                    self.end_session(&detail.message);
                } else {
                    self.empty(at, Refusal { kind: detail.kind(), message: detail.message });
                }
            }
            Verdict::Empty => self.empty(at, Refusal { kind: detail.kind(), message: detail.message }),
            Verdict::Refused => {
                let answered = Refusal { kind: detail.kind(), message: detail.message };
                let refusal = self.unacked[at].refusal.clone().unwrap_or(answered);
                self.settle_at(at, Settled::Refused(refusal));
            }
            Verdict::Unknown => {
                let what = format!("the outcome of the push is unknown: {}", detail.message);
                self.settle_at(at, Settled::Expired(what));
            }
            Verdict::SessionExpired => {
                if let Some(session) = self.session {
                    self.context.sessions.expired(session);
                }
                self.end_session(&detail.message);
            }
            Verdict::SessionLost => {
                let what = format!(
                    "group {} expects number {} of the session, older than all that is unacknowledged here",
                    self.group, detail.expected_seq
                );
                self.end_session(&what);
            }
        }
    }

    /// A refused message's number is used up by an empty body; what was sent behind it is sent again.
    fn empty(&mut self, at: usize, refusal: Refusal) {
        let Some(session) = self.session else { return };
        let message = &mut self.unacked[at];
        message.body = PushBodyBuilder::new(0).finish(session, message.seq, 0);
        message.refusal = Some(refusal);
        message.failures = 0;
        self.epoch += 1;
        // At once, unless a server asked for a pause.
        self.resend_at.get_or_insert_with(Instant::now);
    }

    fn settle_at(&mut self, at: usize, settled: Settled) {
        if let Some(message) = self.unacked.remove(at) {
            self.settle(message, settled);
        }
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
    fn again(&mut self, detail: &ErrorDetail, address: &str) {
        self.context.stats.retried();
        self.epoch += 1;
        // A full queue, a gap and a damaged message are no reasons to look for another leader.
        if self.context.routing.hear_of_recovery(detail) {
            self.refresh = true;
        } else if !matches!(detail.kind(), ErrorKind::Exhausted | ErrorKind::OutOfOrder | ErrorKind::Corrupt)
        {
            self.context.routing.hint(self.group, address, Some(&detail.leader_address));
            self.refresh |= detail.leader_address.is_empty();
        }
        self.resend_at = Some(Instant::now() + self.backoff.pause(detail.retry_after_ms));
    }

    async fn resend(&mut self) {
        self.resend_at = None;
        if std::mem::take(&mut self.refresh) {
            // Nobody answering is found out by sending. Whose deadline comes first is told in time that it is over.
            let until = Instant::now() + self.context.options.attempt_timeout;
            let until = self.next_deadline().map_or(until, |deadline| deadline.min(until));
            let _ = self.context.routing.refresh(until).await;
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
            submission.return_unsent("it waited for earlier pushes until its deadline");
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
            message.permit = None;
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
                    // Its token is gone: nobody will ask.
                    self.settled.remove(&(session, seq));
                }
            }
        }
    }

    /// The session ends on this shard: what was sent stays unknown, what was not sent goes under a new session.
    fn end_session(&mut self, cause: &str) {
        tracing::warn!(group = self.group, cause, unacknowledged = self.unacked.len(), "a push session ends");
        for message in std::mem::take(&mut self.unacked) {
            let settled = match &message.refusal {
                // No other copy of the content was sent than the one that was refused.
                Some(refusal) if message.attempts <= 1 => Settled::Refused(refusal.clone()),
                _ => Settled::Expired(format!("the outcome of the push is unknown: {cause}")),
            };
            self.settle(message, settled);
        }
        if let Some(session) = self.session.take() {
            self.context.sessions.release(session);
        }
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
