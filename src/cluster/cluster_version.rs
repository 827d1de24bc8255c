//! Raising the cluster version: when something first needs it or an operator says so, and every node says that its build knows it.
//!
//! Not raised by itself: as long as nobody asks for what it brings, nodes may go back to an older build. A new cluster begins with
//! the highest that its nodes know, unless it is told otherwise: there is no older build that it was of.
//!
//! Invariant: the version is raised only after every registered node has answered that it knows it. A node that registers
//! meanwhile is asked when it is let in (`admission`).
//!
//! Not here: what it gates (`meta/cluster_version.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{
    ErrorKind, GetNodeStatusRequest, NodeAddress, RaiseClusterVersion, meta_command::Command,
};
use futures_util::future::try_join_all;

use super::node::Node;
use crate::model::CLUSTER_VERSION_MAX;
use crate::service::RequestError;

const ASK_WITHIN: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(20);

impl Node {
    /// Raises the cluster version to `version` at least, or to the highest that this build knows; answers what it is then.
    ///
    /// # Errors
    /// NOT_INITIALIZED without a cluster; INVALID naming a node whose build is too old, UNAVAILABLE naming one that does not answer.
    pub async fn raise_cluster_version(self: &Arc<Self>, version: Option<u32>) -> Result<u32, RequestError> {
        self.require_cluster()?;
        let version = version.unwrap_or(CLUSTER_VERSION_MAX);
        let deadline = Instant::now() + DEADLINE;
        self.require_cluster_version(version, deadline).await?;
        self.wait_for_meta(deadline, |state| state.cluster_version >= version).await;
        Ok(self.meta_state().cluster_version.max(version))
    }

    /// Makes sure that the cluster is of `version` at least.
    ///
    /// # Errors
    /// INVALID naming a node whose build is too old; UNAVAILABLE naming one that does not answer: it may be.
    pub(super) async fn require_cluster_version(
        self: &Arc<Self>,
        version: u32,
        deadline: Instant,
    ) -> Result<(), RequestError> {
        let state = self.meta_state();
        if state.cluster_version >= version {
            return Ok(());
        }
        try_join_all(state.nodes.iter().map(|node| self.expect_to_know(node, version))).await?;
        tracing::info!(version, "every node knows this cluster version: it is raised");
        self.propose_meta(Command::RaiseVersion(RaiseClusterVersion { version }), deadline).await?;
        Ok(())
    }

    async fn expect_to_know(&self, node: &NodeAddress, version: u32) -> Result<(), RequestError> {
        let known = if node.id == self.config.node_id {
            CLUSTER_VERSION_MAX
        } else {
            let mut request = tonic::Request::new(GetNodeStatusRequest::default());
            request.set_timeout(ASK_WITHIN);
            let status = self.peers.admin(&node.address)?.get_node_status(request).await.map_err(|error| {
                let what = format!(
                    "cluster version {version} is needed, and node {} at {} does not say whether it knows it: {error}",
                    node.id, node.address
                );
                RequestError::new(ErrorKind::Unavailable, what).retry_soon()
            })?;
            status.into_inner().cluster_version_max
        };
        if known < version {
            let what = format!(
                "cluster version {version} is needed, and the build of node {} at {} knows versions up to {known}: upgrade it",
                node.id, node.address
            );
            return Err(RequestError::new(ErrorKind::Invalid, what));
        }
        Ok(())
    }
}
