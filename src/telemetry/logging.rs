//! Log lines: to stderr, one a line, filtered by `EVERSHARD_LOG` (default `info`).

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging for this process. Called once, by `main`.
pub fn init_logging() {
    let filter = EnvFilter::try_from_env("EVERSHARD_LOG")
        .unwrap_or_else(|_| EnvFilter::new("info,openraft=error,h2=warn,hyper=warn,tonic=warn"));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(true);
    if subscriber.try_init().is_err() {
        // A test harness has set one up before: its own is kept.
        tracing::debug!("logging was set up already");
    }
}
