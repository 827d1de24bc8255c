//! A worker of a job: an incarnation of a rank, with a lease, a clock and a cursor.
//!
//! Its pushes go under sessions that belong to it: when another takes its rank, or its lease ends, no shard takes them any
//! more, and every call of it fails with FENCED.
//!
//! Invariants:
//! - a step ends only when all pushes of it are acknowledged: who is allowed to read them by the staleness reads them;
//! - the clock here is that of the last tick that was answered: a tick whose answer was lost is made again as it was;
//! - in a job that sums its steps (staleness 0), what is pushed is kept until its step is over, and sent again to leaders that
//!   lost it.
//!
//! Not here: who waits for whom (the servers), jobs themselves (`job`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use evershard_proto::limits::CURSOR_BYTES_MAX;
use evershard_proto::v1::{
    Aggregation, ArriveAtStepReply, ArriveAtStepRequest, CompleteStepRequest, ErrorKind, JoinJobReply,
    LeaveJobRequest, RenewWorkerRequest, TickReply, TickRequest, WorkerIdentity,
};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::client::{Client, Inner};
use crate::contribution::Contribution;
use crate::error::Refusal;
use crate::job::call;
use crate::parts::Prepared;
use crate::push::{self, Content, PushOptions, PushReceipt};
use crate::{Error, PullPart, PushPart, Table};

/// How long a node is asked to wait for the other workers in one call.
const WAIT_MS: u32 = 3000;

/// A worker that has its rank, as far as it knows.
#[derive(Debug)]
pub struct Worker {
    client: Client,
    identity: WorkerIdentity,
    clock: u64,
    barriers: u64,
    cursor: Bytes,
    /// What is pushed, in a job that sums its steps.
    contribution: Option<Contribution>,
    /// The cursor of a summed step whose end was begun: what is pushed then would be in no step.
    ending: Option<Bytes>,
    /// Pushes of the step, begun and not yet acknowledged.
    begun: VecDeque<JoinHandle<Result<PushReceipt, Error>>>,
    fenced: Arc<Mutex<Option<Refusal>>>,
    /// Ends the renewals.
    _renewing: DropGuard,
}

impl Worker {
    pub(crate) fn new(client: &Client, joined: JoinJobReply) -> Result<Self, Error> {
        let internal = || Error::refused(ErrorKind::Internal, "the answer to a join names no worker");
        let identity = joined.worker.ok_or_else(internal)?;
        let definition = joined.definition.unwrap_or_default();
        let lease_ms = definition.lease_ms;
        let sums = definition.aggregation() != Aggregation::Apart;
        let client = client.for_worker(identity);
        let fenced = Arc::new(Mutex::new(None));
        let stop = client.inner.stop.child_token();
        // The task holds no handle of the client: it ends with the last one.
        let renewing = renew(Arc::downgrade(&client.inner), identity, lease_ms, fenced.clone(), stop.clone());
        client.inner.tasks.spawn(renewing);
        Ok(Worker {
            client,
            identity,
            clock: joined.clock,
            barriers: joined.barriers,
            cursor: joined.cursor,
            contribution: sums.then(|| Contribution::new(identity, joined.clock)),
            ending: None,
            begun: VecDeque::new(),
            fenced,
            _renewing: stop.drop_guard(),
        })
    }

    /// Its rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.identity.rank
    }

    /// Its fencing epoch: the higher one has the rank.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.identity.epoch
    }

    /// Steps that the rank has done, by whichever incarnation.
    #[must_use]
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// What the rank's last tick said: where to go on.
    #[must_use]
    pub fn cursor(&self) -> &[u8] {
        &self.cursor
    }

    /// The same table, through this worker.
    #[must_use]
    pub fn table(&self, table: &Table) -> Table {
        Table::new(self.client.inner.clone(), table.number(), table.definition().clone())
            .with_encoding(table.encoding())
    }

    /// Counters of this worker's pushes and pulls.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Pulls rows: see [`Table::pull`]. Every push of the steps that the staleness promises is in them.
    ///
    /// # Errors
    /// As [`Table::pull`]; FENCED when the worker knows that it is.
    pub async fn pull(&self, table: &Table, ids: &[u64], out: &mut [f32]) -> Result<(), Error> {
        self.check()?;
        self.table(table).pull(ids, out).await
    }

    /// Pulls from several tables and tensors at once: see [`Client::pull_parts`].
    ///
    /// # Errors
    /// As [`Client::pull_parts`]; FENCED when the worker knows that it is.
    pub async fn pull_parts(&self, parts: &mut [PullPart<'_>]) -> Result<(), Error> {
        self.check()?;
        self.client.pull_parts(parts).await
    }

    /// Pushes gradients as part of this step; returns when they are applied. In a job that sums its steps: when the leaders have
    /// them in memory; they are applied, with those of all workers, when the step ends.
    ///
    /// # Errors
    /// As [`Table::push`]; FENCED when another has the rank, or the lease ended. In a job that sums its steps an error means that
    /// the push is not part of the step, on no shard.
    pub async fn push(&self, table: &Table, ids: &[u64], gradients: &[f32]) -> Result<PushReceipt, Error> {
        self.push_parts(&[PushPart::Rows { table, ids, gradients }]).await
    }

    /// Pushes gradients to several tables and tensors as part of this step.
    ///
    /// # Errors
    /// As [`Worker::push`].
    pub async fn push_parts(&self, parts: &[PushPart<'_>]) -> Result<PushReceipt, Error> {
        self.check()?;
        let pushed = async {
            let prepared = Prepared::all(parts)?;
            let contents: Vec<Content<'_>> =
                prepared.iter().map(|part| part.content(self.options())).collect();
            let inner = &self.client.inner;
            match &self.contribution {
                Some(contribution) => {
                    self.check_open()?;
                    contribution.begin(inner, &contents, self.options()).await?.wait(inner.clone()).await
                }
                None => push::begin(inner, &contents, self.options()).await?.wait().await,
            }
        };
        match pushed.await {
            Ok(receipt) => Ok(receipt),
            Err(error) => Err(self.judge(error).await),
        }
    }

    /// Begins a push as part of this step; [`Worker::tick`] waits for it.
    ///
    /// # Errors
    /// As [`Table::push_begin`]; FENCED.
    pub async fn push_begin(&mut self, table: &Table, ids: &[u64], gradients: &[f32]) -> Result<(), Error> {
        self.push_parts_begin(&[PushPart::Rows { table, ids, gradients }]).await
    }

    /// Begins a push to several tables and tensors as part of this step.
    ///
    /// # Errors
    /// As [`Worker::push_begin`].
    pub async fn push_parts_begin(&mut self, parts: &[PushPart<'_>]) -> Result<(), Error> {
        self.check()?;
        let prepared = Prepared::all(parts)?;
        let contents: Vec<Content<'_>> = prepared.iter().map(|part| part.content(self.options())).collect();
        let inner = &self.client.inner;
        // A task settles it, so that a tick that is given up half-way loses nothing of what it waited for.
        let settled = if let Some(contribution) = &self.contribution {
            self.check_open()?;
            let begun = contribution.begin(inner, &contents, self.options()).await?;
            inner.tasks.spawn(begun.wait(inner.clone()))
        } else {
            let begun = push::begin(inner, &contents, self.options()).await?;
            inner.tasks.spawn(begun.wait())
        };
        self.begun.push_back(settled);
        Ok(())
    }

    /// # Errors
    /// INVALID when the end of a summed step was begun and not heard of.
    fn check_open(&self) -> Result<(), Error> {
        match self.ending {
            None => Ok(()),
            Some(_) => Err(Error::invalid(
                "the step is ending, and its end was not heard of: tick again before you push",
            )),
        }
    }

    fn options(&self) -> PushOptions {
        PushOptions { clock: self.clock, ..PushOptions::default() }
    }

    /// Ends the step: `cursor` is where a replacement would go on. Returns when the job's staleness allows the next step,
    /// however long the others take.
    ///
    /// # Errors
    /// What became of a push that was begun: the step has not ended then, and the next call waits for the others; FENCED,
    /// JOB_ABORTED; [`Error::Unavailable`]: the step may have ended, and the same call may be made again. In a job that sums its
    /// steps it must be, before anything is pushed.
    pub async fn tick(&mut self, cursor: &[u8]) -> Result<(), Error> {
        self.settle().await?;
        if cursor.len() > CURSOR_BYTES_MAX {
            let what = format!("a cursor has at most {CURSOR_BYTES_MAX} bytes, not {}", cursor.len());
            return Err(Error::invalid(what));
        }
        let cursor = Bytes::copy_from_slice(cursor);
        if let Some(contribution) = self.contribution.clone() {
            return self.end_summed_step(&contribution, cursor).await;
        }
        self.meet(self.clock + 1, self.barriers, cursor.clone()).await?;
        self.clock += 1;
        self.cursor = cursor;
        Ok(())
    }

    /// Everything to every shard; to the meta group that it is there; what the meta group publishes to every shard; and that it
    /// is applied to the meta group. Each may be done again.
    async fn end_summed_step(&mut self, contribution: &Contribution, cursor: Bytes) -> Result<(), Error> {
        let inner = self.client.inner.clone();
        let (mut is_delivered, mut is_stuck) = (false, false);
        loop {
            self.check()?;
            if !is_delivered && let Err(error) = contribution.deliver(&inner).await {
                return Err(self.judge(error).await);
            }
            // From here on the shards may apply it, whoever hears of it.
            let cursor = self.ending.get_or_insert_with(|| cursor.clone()).clone();
            let arrived = self.arrive(&cursor, is_stuck).await?;
            let ArriveAtStepReply { publication, over, counted, step, waits_for } = arrived;
            (is_delivered, is_stuck) = (false, false);
            if over {
                // Too late for a step that the others ended without it: its gradients go with the next one.
                contribution.move_to(step, !counted);
                self.clock = step;
                if counted {
                    self.cursor = cursor;
                    self.ending = None;
                    return Ok(());
                }
                continue;
            }
            let Some(publication) = publication else {
                tracing::debug!(rank = self.identity.rank, step, ?waits_for, "waiting for other workers");
                continue;
            };
            match contribution.apply(&inner, &publication).await {
                Ok(true) => {
                    self.complete(step).await?;
                    is_delivered = true;
                }
                // Some leader lacks what others contribute: they will see it, or are gone.
                Ok(false) => is_stuck = true,
                Err(error) => return Err(self.judge(error).await),
            }
        }
    }

    async fn arrive(&self, cursor: &Bytes, stuck: bool) -> Result<ArriveAtStepReply, Error> {
        let request = ArriveAtStepRequest {
            worker: Some(self.identity),
            step: self.clock,
            cursor: cursor.clone(),
            wait_ms: WAIT_MS,
            stuck,
        };
        let told = call(&self.client.inner, "arrive at a step's end", |mut client| {
            let request = request.clone();
            async move { client.arrive_at_step(request).await }
        });
        told.await.map_err(|error| self.note(error))
    }

    async fn complete(&self, step: u64) -> Result<(), Error> {
        let request = CompleteStepRequest { worker: Some(self.identity), step };
        let told = call(&self.client.inner, "end a step", |mut client| async move {
            client.complete_step(request).await
        });
        told.await.map(|_| ()).map_err(|error| self.note(error))
    }

    /// Waits until every worker has come to its barrier of the same number.
    ///
    /// # Errors
    /// As [`Worker::tick`].
    pub async fn barrier(&mut self) -> Result<(), Error> {
        self.settle().await?;
        self.meet(self.clock, self.barriers + 1, Bytes::new()).await?;
        self.barriers += 1;
        Ok(())
    }

    /// Its part is done: nobody waits for it any more.
    ///
    /// # Errors
    /// As [`Worker::tick`]; INVALID, when it has left, if it pushed to a step that it did not end: those gradients are in none.
    pub async fn leave(mut self) -> Result<(), Error> {
        self.settle().await?;
        let is_left_out = self.contribution.as_ref().is_some_and(|contribution| !contribution.is_empty());
        let is_ending = self.ending.is_some();
        let request = LeaveJobRequest { worker: Some(self.identity) };
        call(&self.client.inner, "leave a job", |mut client| async move { client.leave_job(request).await })
            .await?;
        if is_left_out {
            let what = if is_ending {
                "the worker has left before it heard that its step ended: whether what it pushed to it is applied is unknown"
            } else {
                "the worker has left in the middle of a step: what it pushed since its last tick is not applied"
            };
            return Err(Error::refused(ErrorKind::Invalid, what));
        }
        Ok(())
    }

    /// Waits for what was begun, one after the other. What failed is told once, and the rest is waited for when this is called
    /// again.
    async fn settle(&mut self) -> Result<(), Error> {
        self.check()?;
        while let Some(begun) = self.begun.front_mut() {
            let settled = begun.await;
            self.begun.pop_front();
            // Tasks end early only with the client.
            if let Err(error) = settled.unwrap_or(Err(Error::Closed)) {
                return Err(self.judge(error).await);
            }
        }
        Ok(())
    }

    async fn meet(&self, clock: u64, barriers: u64, cursor: Bytes) -> Result<(), Error> {
        loop {
            self.check()?;
            let request = TickRequest {
                worker: Some(self.identity),
                clock,
                barriers,
                cursor: cursor.clone(),
                wait_ms: WAIT_MS,
            };
            let told = call(&self.client.inner, "end a step", |mut client| {
                let request = request.clone();
                async move { client.tick(request).await }
            });
            let TickReply { may_go_on, slowest, waits_for } = told.await.map_err(|error| self.note(error))?;
            if may_go_on {
                return Ok(());
            }
            tracing::debug!(
                rank = self.identity.rank,
                clock,
                slowest,
                ?waits_for,
                "waiting for other workers"
            );
        }
    }

    fn check(&self) -> Result<(), Error> {
        match &*self.fenced.lock() {
            Some(refusal) => Err(Error::Refused(refusal.clone())),
            None => Ok(()),
        }
    }

    /// Remembers that the worker is fenced, if that is what an error says.
    fn note(&self, error: Error) -> Error {
        if let Error::Refused(refusal) = &error
            && is_end(refusal.kind)
        {
            *self.fenced.lock() = Some(refusal.clone());
        }
        error
    }

    /// What is behind a push that failed: its session ends when the worker is fenced. What is known of its ids stays said.
    async fn judge(&self, error: Error) -> Error {
        let request = RenewWorkerRequest { worker: Some(self.identity) };
        let asked = call(&self.client.inner, "renew a worker", |mut client| async move {
            client.renew_worker(request).await
        });
        let Err(Error::Refused(refusal)) = asked.await else { return error };
        if !is_end(refusal.kind) {
            return error;
        }
        *self.fenced.lock() = Some(refusal.clone());
        match error {
            Error::PartialPush(mut partial) => {
                partial.kind = Some(refusal.kind);
                partial.cause = refusal.message;
                Error::PartialPush(partial)
            }
            _ => Error::Refused(refusal),
        }
    }
}

/// Whether it is over for this incarnation.
fn is_end(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Fenced | ErrorKind::JobAborted | ErrorKind::UnknownJob)
}

/// Keeps a worker's lease until `stop`, or until it is fenced.
async fn renew(
    inner: std::sync::Weak<Inner>,
    identity: WorkerIdentity,
    lease_ms: u32,
    fenced: Arc<Mutex<Option<Refusal>>>,
    stop: CancellationToken,
) {
    let every = Duration::from_millis(u64::from(lease_ms / 4)).max(Duration::from_millis(100));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(every) => {}
        }
        let Some(inner) = inner.upgrade() else { return };
        let request = RenewWorkerRequest { worker: Some(identity) };
        let asked =
            call(&inner, "renew a worker", |mut client| async move { client.renew_worker(request).await });
        let told = tokio::select! {
            () = stop.cancelled() => return,
            told = asked => told,
        };
        match told {
            Ok(_) => {}
            Err(Error::Refused(refusal)) if is_end(refusal.kind) => {
                *fenced.lock() = Some(refusal);
                return;
            }
            Err(error) => {
                tracing::warn!(rank = identity.rank, epoch = identity.epoch, %error, "the worker's lease was not renewed");
            }
        }
    }
}
