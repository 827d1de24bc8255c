//! `evershardctl completions SHELL`.

use std::process::ExitCode;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::error::CtlError;
use crate::output;

/// Print a completion script for a shell.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  evershardctl completions bash > ~/.local/share/bash-completion/completions/evershardctl")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn run(args: &CompletionsArgs) -> Result<ExitCode, CtlError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "evershardctl", &mut script);
    output::text_line(String::from_utf8_lossy(&script).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
