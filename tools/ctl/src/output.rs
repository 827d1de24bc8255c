//! Prints data to stdout: aligned tables for people, JSON for programs.

use std::io::{ErrorKind, Write};

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::error::CtlError;

/// Prints a value as indented JSON.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<(), CtlError> {
    let text = serde_json::to_string_pretty(value).map_err(std::io::Error::other)?;
    text_line(&text)
}

/// Prints one block of text and ends the line.
pub(crate) fn text_line(text: &str) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        // The reader has seen enough (`| head`).
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A table without lines, which scripts can cut too.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.map(|title| Cell::new(title.to_uppercase())));
    for row in rows {
        table.add_row(row.map(|text| {
            let number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            Cell::new(text).set_alignment(if number { CellAlignment::Right } else { CellAlignment::Left })
        }));
    }
    table
}

/// Prints a table.
pub(crate) fn print(table: &Table) -> Result<(), CtlError> {
    text_line(&table.trim_fmt())
}
