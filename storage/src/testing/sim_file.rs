//! An open file of a simulated disk.
//!
//! Not here: what a power cut takes (`sim_inode`), names (`sim_disk`).

use super::sim_disk::{SimDisk, State, power_is_off};
use crate::disk::DiskFile;
use std::io::{self, IoSlice};

/// An open file; dead once the power was cut or the process killed.
#[derive(Debug)]
pub(super) struct SimFile {
    pub(super) disk: SimDisk,
    pub(super) inode: usize,
    pub(super) generation: u64,
}

impl SimFile {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.disk.state.lock();
        if state.is_off || state.generation != self.generation {
            return Err(power_is_off());
        }
        act(&mut state)
    }
}

impl DiskFile for SimFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.with(|state| {
            let live = state.inodes[self.inode].live();
            let start = to_usize(offset)?;
            let end = start.checked_add(buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            buffer.copy_from_slice(live.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        })
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let offset = to_usize(offset)?;
        self.with(|state| {
            state.io(|state| {
                let length = state.inodes[self.inode].live().len();
                state.need_space(offset + bytes.len() > length)?;
                state.inodes[self.inode].write(offset, bytes.to_vec());
                Ok(())
            })
        })
    }

    fn write_all_vectored_at(&self, slices: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let mut joined = Vec::with_capacity(slices.iter().map(|slice| slice.len()).sum());
        slices.iter().for_each(|slice| joined.extend_from_slice(slice));
        self.write_all_at(&joined, offset)
    }

    fn length(&self) -> io::Result<u64> {
        self.with(|state| Ok(state.inodes[self.inode].live().len() as u64))
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        let length = to_usize(length)?;
        self.with(|state| {
            state.io(|state| {
                state.need_space(length > state.inodes[self.inode].live().len())?;
                state.inodes[self.inode].set_length(length);
                Ok(())
            })
        })
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        if self.length()? < length { self.set_length(length) } else { Ok(()) }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.with(|state| state.sync_io(|state| state.inodes[self.inode].sync()))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync_data()
    }
}

fn to_usize(value: u64) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::ErrorKind::InvalidInput.into())
}
