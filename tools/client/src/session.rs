//! Sessions: issued by the cluster, kept alive by this client.
//!
//! Invariants:
//! - an open that is tried again is tried with its nonce, so that it is one session whatever was lost;
//! - a session is kept alive as long as a lane uses it, and no longer: the cluster ends it when its lease is over;
//! - a renewal comes due at a third of its session's lease, and is waited for until five sixths of it are over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{OpenSessionRequest, RenewSessionRequest, WorkerIdentity};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::admin::Admin;

/// A session that is kept alive.
#[derive(Debug, Clone, Copy)]
struct Lease {
    /// Lanes that number their messages under it.
    uses: usize,
    length: Duration,
    due: Instant,
}

impl Lease {
    /// A lease of `seconds` that was asked for at `asked_at`: the cluster counts from then at the earliest.
    fn new(uses: usize, seconds: u32, asked_at: Instant) -> Self {
        let length = Duration::from_secs(u64::from(seconds.max(1)));
        Lease { uses, length, due: asked_at + length / 3 }
    }
}

/// The sessions of a client.
#[derive(Debug)]
pub(crate) struct Sessions {
    admin: Admin,
    /// Whose they are: they end when it is fenced, and no more are opened.
    worker: Option<WorkerIdentity>,
    shared: tokio::sync::Mutex<Option<u64>>,
    live: Mutex<BTreeMap<u64, Lease>>,
    opened: Notify,
}

impl Sessions {
    pub(crate) fn new(admin: Admin, worker: Option<WorkerIdentity>) -> Arc<Self> {
        Arc::new(Sessions {
            admin,
            worker,
            shared: tokio::sync::Mutex::new(None),
            live: Mutex::default(),
            opened: Notify::new(),
        })
    }

    /// The session that lanes start with, used once more until [`Sessions::release`].
    pub(crate) async fn shared(&self, deadline: Instant) -> Result<u64, Error> {
        let mut shared = self.shared.lock().await;
        // One that ended, or that every lane gave up, is not kept alive any more.
        if let Some(session) = *shared
            && let Some(lease) = self.live.lock().get_mut(&session)
        {
            lease.uses += 1;
            return Ok(session);
        }
        let session = self.open(deadline).await?;
        *shared = Some(session);
        Ok(session)
    }

    /// A session of its own, for a lane that gave one up, until [`Sessions::release`].
    pub(crate) async fn open(&self, deadline: Instant) -> Result<u64, Error> {
        let nonce: [u8; 16] = rand::random();
        let request = OpenSessionRequest { nonce: nonce.to_vec().into(), worker: self.worker };
        let asked_at = Instant::now();
        let reply = self
            .admin
            .call("open a session", deadline, move |mut client| {
                let request = request.clone();
                async move { client.open_session(request).await }
            })
            .await?;
        self.live.lock().insert(reply.session, Lease::new(1, reply.lease_seconds, asked_at));
        self.opened.notify_one();
        Ok(reply.session)
    }

    /// A lane uses `session` no longer. Other lanes may: numbers are per session and shard.
    pub(crate) fn release(&self, session: u64) {
        let mut live = self.live.lock();
        if let Some(lease) = live.get_mut(&session) {
            lease.uses = lease.uses.saturating_sub(1);
            if lease.uses == 0 {
                live.remove(&session);
            }
        }
    }

    /// The cluster has ended `session`, for all lanes.
    pub(crate) fn expired(&self, session: u64) {
        self.live.lock().remove(&session);
    }

    /// Renews leases until `stop`.
    pub(crate) async fn renew(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let due = self.live.lock().values().map(|lease| lease.due).min();
            let pause = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                // A new session may come due before those that were known.
                () = self.opened.notified() => continue,
                () = pause => {}
            }
            let now = Instant::now();
            let due: Vec<(u64, Lease)> = self
                .live
                .lock()
                .iter()
                .filter(|(_, lease)| lease.due <= now)
                .map(|(session, lease)| (*session, *lease))
                .collect();
            tokio::select! {
                () = stop.cancelled() => return,
                _ = join_all(due.iter().map(|(session, lease)| self.renew_one(*session, *lease))) => {}
            }
        }
    }

    async fn renew_one(&self, session: u64, lease: Lease) {
        let asked_at = Instant::now();
        let renewed =
            self.admin.call("renew a session", asked_at + lease.length / 2, move |mut client| async move {
                client.renew_session(RenewSessionRequest { session }).await
            });
        let renewed = renewed.await;
        let mut live = self.live.lock();
        match renewed {
            // It may have been released meanwhile.
            Ok(reply) => {
                if let Some(lease) = live.get_mut(&session) {
                    *lease = Lease::new(lease.uses, reply.lease_seconds, asked_at);
                }
            }
            Err(Error::SessionExpired(_)) => drop(live.remove(&session)),
            Err(error) => {
                tracing::warn!(session, %error, "the session's lease was not renewed");
                if let Some(lease) = live.get_mut(&session) {
                    lease.due = Instant::now() + lease.length / 12;
                }
            }
        }
    }
}
