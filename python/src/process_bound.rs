//! A value that belongs to the process that made it.
//!
//! The client's threads do not survive a fork, and may have held its locks at that moment. So in a forked child such a
//! value is neither used (an error says so) nor dropped (its memory is left alone): the child makes a connection of its own.

use std::mem::ManuallyDrop;

use pyo3::prelude::*;

use crate::errors::AlreadyClosed;

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    pid: u32,
    value: ManuallyDrop<T>,
}

impl<T> ProcessBound<T> {
    pub(crate) fn new(value: T) -> Self {
        ProcessBound { pid: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// # Errors
    /// This is a forked child of the process that made the value.
    pub(crate) fn get(&self) -> PyResult<&T> {
        if self.pid == std::process::id() {
            Ok(&self.value)
        } else {
            Err(AlreadyClosed::new_err(
                "this belongs to the parent process: it did not come along through the fork",
            ))
        }
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // SAFETY: the value is not used after this; it is dropped here only, once.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
