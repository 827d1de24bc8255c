//! Calls to other nodes' services: one channel per address, kept for the next call.
//!
//! Invariant: every call has a deadline; a node that does not answer is an error that names it, never a wait for ever.
//!
//! Not here: the lanes of the raft crate (they have connections of their own).

use std::collections::HashMap;
use std::time::Duration;

use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_proto::v1::ErrorKind;
use evershard_proto::v1::admin_service_client::AdminServiceClient;
use evershard_proto::v1::checkpoint_service_client::CheckpointServiceClient;
use evershard_proto::v1::node_service_client::NodeServiceClient;
use parking_lot::Mutex;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use super::recoveries::RecoveryEpoch;
use crate::service::RequestError;

/// How long one call to another node may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The node service of another node, asked under this node's recovery epoch.
pub type NodeClient = NodeServiceClient<InterceptedService<Channel, RecoveryEpoch>>;

/// The checkpoint service of another node, asked under this node's recovery epoch.
pub type CheckpointClient = CheckpointServiceClient<InterceptedService<Channel, RecoveryEpoch>>;

/// Channels to other nodes.
#[derive(Debug)]
pub struct PeerClients {
    recovery: RecoveryEpoch,
    channels: Mutex<HashMap<String, Channel>>,
}

impl PeerClients {
    /// Calls between nodes say the epoch `recovery`.
    #[must_use]
    pub fn new(recovery: RecoveryEpoch) -> Self {
        PeerClients { recovery, channels: Mutex::default() }
    }

    /// The node service at `address`.
    ///
    /// # Errors
    /// INVALID when the address is no URI.
    pub fn node(&self, address: &str) -> Result<NodeClient, RequestError> {
        let channel = InterceptedService::new(self.channel(address)?, self.recovery.clone());
        Ok(NodeServiceClient::new(channel).max_decoding_message_size(64 << 20))
    }

    /// The checkpoint service at `address`, asked under this node's recovery epoch.
    ///
    /// # Errors
    /// INVALID when the address is no URI.
    pub fn checkpoints(&self, address: &str) -> Result<CheckpointClient, RequestError> {
        let channel = InterceptedService::new(self.channel(address)?, self.recovery.clone());
        Ok(CheckpointServiceClient::new(channel))
    }

    /// The admin service at `address`. Such calls say no epoch: they look at nodes of any.
    ///
    /// # Errors
    /// INVALID when the address is no URI.
    pub fn admin(&self, address: &str) -> Result<AdminServiceClient<Channel>, RequestError> {
        Ok(AdminServiceClient::new(self.channel(address)?).max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    fn channel(&self, address: &str) -> Result<Channel, RequestError> {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = Endpoint::from_shared(address.to_string())
            .map_err(|e| RequestError::new(ErrorKind::Invalid, format!("address {address:?}: {e}")))?;
        let channel = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(CALL_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(2))
            .keep_alive_timeout(Duration::from_secs(2))
            .connect_lazy();
        channels.insert(address.to_string(), channel.clone());
        Ok(channel)
    }
}
