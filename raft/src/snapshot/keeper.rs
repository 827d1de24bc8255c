//! Lets go, after a while, of what transfers of snapshots left: links that nobody is sent any more, and parts that nobody
//! goes on sending.
//!
//! Not here: when they are made (`builder`, `installer`).

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::builder::LinkSource;
use super::installer::Installer;
use crate::executor::{self, ApplyExecutor};
use crate::options::RaftLimits;
use crate::type_config::Runtime;

/// Looks in the time that links are kept; what is counted is looks, so that a simulation owns the time.
const LOOKS: u32 = 4;

/// Looks after a replica's links and parts until the group stops.
pub(crate) async fn run_keeper<RT: Runtime>(
    links: LinkSource,
    installer: Arc<Installer>,
    executor: Arc<dyn ApplyExecutor>,
    limits: RaftLimits,
    stop: CancellationToken,
) {
    let pause = limits.snapshot_links_kept / LOOKS;
    let parts_looks = u32::try_from(limits.snapshot_parts_kept.as_nanos() / pause.as_nanos().max(1));
    let parts_looks = parts_looks.unwrap_or(u32::MAX);
    loop {
        let stopped = std::pin::pin!(stop.cancelled());
        let paused = std::pin::pin!(RT::sleep(pause));
        if let futures_util::future::Either::Left(_) = futures_util::future::select(stopped, paused).await {
            return;
        }
        links.look(LOOKS);
        let installer = Arc::clone(&installer);
        if executor::file(&*executor, move || installer.look(parts_looks)).await.is_err() {
            tracing::error!("looking after parts of a snapshot panicked");
        }
    }
}
