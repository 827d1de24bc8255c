//! `evershardctl`: looks at a cluster and changes it, over the same gRPC services that any client may use.
//!
//! Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the cluster is unavailable.
//! One file per command: `commands/<noun>/<verb>.rs`.
//!
//! Not here: reading a node's disk while it is down (a tool of its own will).

mod cli;
mod commands;
mod confirm;
mod connection;
mod error;
mod output;

use std::process::ExitCode;

use clap::Parser;

use cli::Cli;

fn main() -> ExitCode {
    // clap exits with 2 on wrong usage by itself.
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("evershardctl: cannot start: {error}");
            return ExitCode::from(1);
        }
    };
    match runtime.block_on(commands::run(cli)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("evershardctl: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
