//! Sessions: issued by the cluster, kept alive by this client.
//!
//! Invariant: an open that is tried again is tried with its nonce, so that it is one session whatever was lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{OpenSessionRequest, RenewSessionRequest};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::admin::Admin;

/// The sessions of a client.
#[derive(Debug)]
pub(crate) struct Sessions {
    admin: Admin,
    shared: tokio::sync::Mutex<Option<u64>>,
    live: Mutex<(BTreeSet<u64>, Duration)>,
}

impl Sessions {
    pub(crate) fn new(admin: Admin) -> Arc<Self> {
        Arc::new(Sessions {
            admin,
            shared: tokio::sync::Mutex::new(None),
            live: Mutex::new((BTreeSet::new(), Duration::from_secs(60))),
        })
    }

    /// The session that lanes start with.
    pub(crate) async fn shared(&self, deadline: Instant) -> Result<u64, Error> {
        let mut shared = self.shared.lock().await;
        if let Some(session) = *shared {
            return Ok(session);
        }
        let session = self.open(deadline).await?;
        *shared = Some(session);
        Ok(session)
    }

    /// A session of its own, for a lane that gave one up.
    pub(crate) async fn open(&self, deadline: Instant) -> Result<u64, Error> {
        let nonce: [u8; 16] = rand::random();
        let request = OpenSessionRequest { nonce: nonce.to_vec().into() };
        let reply = self
            .admin
            .call("open a session", deadline, move |mut client| {
                let request = request.clone();
                async move { client.open_session(request).await }
            })
            .await?;
        let mut live = self.live.lock();
        live.0.insert(reply.session);
        live.1 = Duration::from_secs(u64::from(reply.lease_seconds.max(3)));
        Ok(reply.session)
    }

    /// A lane gave `session` up: nobody keeps it alive for that lane alone.
    pub(crate) async fn expired(&self, session: u64) {
        let mut shared = self.shared.lock().await;
        if *shared == Some(session) {
            *shared = None;
        }
        self.live.lock().0.remove(&session);
    }

    /// Renews leases until `stop`.
    pub(crate) async fn renew(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let (sessions, lease) = self.live.lock().clone();
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(lease / 3) => {}
            }
            for session in sessions {
                let deadline = Instant::now() + lease / 6;
                let renewed = self.admin.call("renew a session", deadline, move |mut client| async move {
                    client.renew_session(RenewSessionRequest { session }).await
                });
                tokio::select! {
                    () = stop.cancelled() => return,
                    renewed = renewed => match renewed {
                        Ok(_) => {}
                        Err(Error::SessionExpired(_)) => self.expired(session).await,
                        Err(error) => tracing::warn!(session, %error, "the session's lease was not renewed"),
                    }
                }
            }
        }
    }
}
