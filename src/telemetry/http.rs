//! Metrics and health over HTTP: `/metrics` (Prometheus), `/livez`, `/readyz`.
//!
//! Invariant: health cannot get stuck: readiness is read from a value that the node keeps up to date, never computed
//! by asking a group.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::metric_definitions;

/// Metrics could not be set up or served.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The address is taken or not ours.
    #[error(
        "cannot listen for metrics on {address}: {source}; is another node running there? choose another --http"
    )]
    Bind {
        /// The configured address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The metrics recorder.
    #[error("metrics: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
}

/// Whether the node is ready, and why not. Shared with whoever finds out: the agent and the disk's keeper, which must not
/// wait for each other.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Reasons>);

#[derive(Debug, Default)]
struct Reasons {
    node: ArcSwap<Option<String>>,
    disk: ArcSwap<Option<String>>,
    note: ArcSwap<Option<String>>,
}

impl Readiness {
    /// A node that is starting.
    #[must_use]
    pub fn starting() -> Self {
        let reasons = Reasons { node: ArcSwap::from_pointee(Some("starting".into())), ..Reasons::default() };
        Readiness(Arc::new(reasons))
    }

    /// `None`: ready. Otherwise the reason why not.
    pub fn set(&self, not_ready: Option<String>) {
        self.0.node.store(Arc::new(not_ready));
        self.measure();
    }

    /// `problem`: the disk keeps the node from being ready. `note`: it does not, but people should know.
    pub fn set_disk(&self, problem: Option<String>, note: Option<String>) {
        self.0.disk.store(Arc::new(problem));
        self.0.note.store(Arc::new(note));
        self.measure();
    }

    fn measure(&self) {
        let is_ready = self.0.node.load().is_none() && self.0.disk.load().is_none();
        metrics::gauge!(metric_definitions::NODE_READY).set(if is_ready { 1.0 } else { 0.0 });
    }

    /// The reason why the node is not ready.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.0.disk.load().as_ref().clone().or_else(|| self.0.node.load().as_ref().clone())
    }

    /// What people should know of a node that is ready.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        self.0.note.load().as_ref().clone()
    }
}

/// The listener, bound before anything else of the node starts.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
    handle: PrometheusHandle,
    readiness: Readiness,
}

impl HttpServer {
    /// Binds `address` and installs the process's metrics recorder.
    ///
    /// # Errors
    /// [`HttpError`], naming the address.
    pub async fn bind(address: SocketAddr, readiness: Readiness) -> Result<Self, HttpError> {
        let listener =
            TcpListener::bind(address).await.map_err(|source| HttpError::Bind { address, source })?;
        let buckets =
            [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 4.0];
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &buckets)?
            .install_recorder()?;
        metric_definitions::describe();
        Ok(HttpServer { listener, handle, readiness })
    }

    /// Serves until `stop`.
    ///
    /// # Errors
    /// What the system said.
    pub async fn serve(self, stop: CancellationToken) -> std::io::Result<()> {
        let HttpServer { listener, handle, readiness } = self;
        let router = Router::new()
            .route("/livez", get(|| async { "alive\n" }))
            .route(
                "/readyz",
                get(move || async move {
                    match readiness.problem() {
                        None => {
                            let note = readiness.note().map(|note| format!("note: {note}\n"));
                            (StatusCode::OK, format!("ready\n{}", note.unwrap_or_default()))
                        }
                        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {problem}\n")),
                    }
                }),
            )
            .route(
                "/metrics",
                get(move || async move {
                    handle.run_upkeep();
                    handle.render()
                }),
            );
        axum::serve(listener, router).with_graceful_shutdown(async move { stop.cancelled().await }).await
    }
}
