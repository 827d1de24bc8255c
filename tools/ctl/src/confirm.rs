//! Asking before something that cannot be undone.

use std::io::{BufRead, IsTerminal, Write, stderr, stdin};

use crate::error::CtlError;

/// Asks on the terminal; without one the command's `--yes` is needed.
pub(crate) fn confirm(question: &str) -> Result<(), CtlError> {
    if !stdin().is_terminal() {
        return Err(CtlError::NotConfirmed { hint: "there is no terminal to ask: say --yes" });
    }
    let mut talk = stderr();
    write!(talk, "{question} [y/N] ")?;
    talk.flush()?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(CtlError::NotConfirmed { hint: "nothing was changed" }),
    }
}
