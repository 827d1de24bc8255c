//! A disk in memory that loses what was not synced, tears writes, flips bits and fails on demand.
//!
//! Every mutating call is one I/O and has a number, from 1. The power can be cut at any number: that I/O may reach
//! the disk in part, no later one does, and all handles are dead until [`SimDisk::power_cycle`].
//!
//! Invariants:
//! - The same calls with the same seed give the same bytes.
//! - Names follow the same rule as bytes: without `sync_dir`, a power cut keeps only a prefix of the changes.
//!
//! Not here: time. A simulated disk is never slow.

use super::sim_file::SimFile;
use super::sim_inode::SimInode;
use crate::disk::{DirectoryLock, Disk, DiskFile};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a power cut takes of the changes that were not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Everything.
    All,
    /// Nothing: the cache happened to be written out.
    Nothing,
    /// An arbitrary part, sector by sector, drawn from the disk's seed.
    Random,
}

#[derive(Debug, Clone)]
enum NameChange {
    Set(PathBuf, usize),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
}

#[derive(Debug, Clone, Default)]
pub(super) struct State {
    pub(super) inodes: Vec<SimInode>,
    names: BTreeMap<PathBuf, usize>,
    durable_names: BTreeMap<PathBuf, usize>,
    pending_names: Vec<NameChange>,
    directories: Vec<PathBuf>,
    io_count: u64,
    power_cut_at: Option<u64>,
    fail_at: Option<(u64, i32)>,
    syncs_fail: Option<i32>,
    is_full: bool,
    pub(super) is_off: bool,
    pub(super) generation: u64,
    random: u64,
}

/// A disk in memory; clones share it.
#[derive(Debug, Clone, Default)]
pub struct SimDisk {
    pub(super) state: Arc<Mutex<State>>,
}

impl SimDisk {
    /// An empty disk; the seed decides what random losses take.
    pub fn new(seed: u64) -> Self {
        SimDisk { state: Arc::new(Mutex::new(State { random: seed, ..State::default() })) }
    }

    /// A copy that goes its own way, with another seed.
    pub fn fork(&self, seed: u64) -> Self {
        let mut state = self.state.lock().clone();
        state.random = seed;
        SimDisk { state: Arc::new(Mutex::new(state)) }
    }

    /// Mutating calls so far.
    pub fn io_count(&self) -> u64 {
        self.state.lock().io_count
    }

    /// The I/O with this number is the last that may reach the disk, in part.
    pub fn cut_power_at(&self, io_number: u64) {
        self.state.lock().power_cut_at = Some(io_number);
    }

    /// Cuts the power now.
    pub fn cut_power(&self) {
        self.state.lock().is_off = true;
    }

    /// Whether the power is cut.
    pub fn is_off(&self) -> bool {
        self.state.lock().is_off
    }

    /// The I/O with this number fails, once, with this error number, and has no effect.
    pub fn fail_at(&self, io_number: u64, errno: i32) {
        self.state.lock().fail_at = Some((io_number, errno));
    }

    /// All syncs fail from now on (`Some`) or succeed again (`None`).
    pub fn fail_syncs(&self, errno: Option<i32>) {
        self.state.lock().syncs_fail = errno;
    }

    /// From now on no file can be made or grow (`true`), or there is space again (`false`).
    pub fn set_full(&self, is_full: bool) {
        self.state.lock().is_full = is_full;
    }

    /// Cuts the power, loses what `loss` says, and turns it on again. Old handles stay dead.
    pub fn power_cycle(&self, loss: Loss) {
        let mut state = self.state.lock();
        let State { inodes, names, durable_names, pending_names, random, .. } = &mut *state;
        let mut next = || splitmix(random);
        let kept = match loss {
            Loss::All => 0,
            Loss::Nothing => pending_names.len(),
            Loss::Random => (next() % (pending_names.len() as u64 + 1)) as usize,
        };
        for change in pending_names.drain(..).take(kept) {
            apply_name(durable_names, &change);
        }
        names.clone_from(durable_names);
        for inode in inodes {
            match loss {
                Loss::All => inode.lose_all(),
                Loss::Nothing => inode.sync(),
                Loss::Random => inode.lose_some(&mut next),
            }
        }
        state.power_cut_at = None;
        state.fail_at = None;
        state.is_off = false;
        state.generation += 1;
    }

    /// The process was killed: nothing is lost, but its handles are dead.
    pub fn kill_process(&self) {
        self.state.lock().generation += 1;
    }

    /// All files, sorted.
    pub fn files(&self) -> Vec<PathBuf> {
        self.state.lock().names.keys().cloned().collect()
    }

    /// A file's bytes as the process sees them.
    pub fn contents(&self, path: &Path) -> Option<Vec<u8>> {
        let state = self.state.lock();
        let inode = *state.names.get(path)?;
        Some(state.inodes[inode].live().to_vec())
    }

    /// Edits a file at rest; everything written so far counts as synced. False if there is no such file.
    pub fn edit(&self, path: &Path, edit: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut state = self.state.lock();
        let Some(&inode) = state.names.get(path) else { return false };
        state.inodes[inode].edit(edit);
        true
    }

    /// Flips one bit of a file at rest.
    pub fn flip_bit(&self, path: &Path, bit: usize) -> bool {
        self.edit(path, |bytes| bytes[bit / 8] ^= 1 << (bit % 8))
    }

    /// Removes a file at rest, durably.
    pub fn lose_file(&self, path: &Path) -> bool {
        let mut state = self.state.lock();
        state.durable_names.remove(path);
        state.names.remove(path).is_some()
    }

    fn handle(&self, state: &State, inode: usize) -> Arc<dyn DiskFile> {
        Arc::new(SimFile { disk: self.clone(), inode, generation: state.generation })
    }
}

impl State {
    /// Counts an I/O and does it, unless it is to fail. The one at which the power is cut is done but not synced.
    pub(super) fn io<T>(&mut self, act: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        if self.is_off {
            return Err(power_is_off());
        }
        self.io_count += 1;
        if let Some((number, errno)) = self.fail_at
            && number == self.io_count
        {
            self.fail_at = None;
            return Err(io::Error::from_raw_os_error(errno));
        }
        if self.power_cut_at.is_some_and(|number| self.io_count >= number) {
            let _lost = act(self);
            self.is_off = true;
            return Err(power_is_off());
        }
        act(self)
    }

    /// A sync at which the power is cut has no certain effect: nothing becomes durable.
    pub(super) fn sync_io(&mut self, act: impl FnOnce(&mut State)) -> io::Result<()> {
        let syncs_fail = self.syncs_fail;
        let is_cut = self.power_cut_at.is_some_and(|number| self.io_count + 1 >= number);
        self.io(|state| {
            if let Some(errno) = syncs_fail {
                return Err(io::Error::from_raw_os_error(errno));
            }
            if !is_cut {
                act(state);
            }
            Ok(())
        })
    }

    /// Refuses what needs space, when there is none.
    pub(super) fn need_space(&self, needs: bool) -> io::Result<()> {
        if self.is_full && needs { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(()) }
    }

    fn change_name(&mut self, change: NameChange) {
        apply_name(&mut self.names, &change);
        self.pending_names.push(change);
    }

    fn inode_of(&self, path: &Path) -> io::Result<usize> {
        self.names.get(path).copied().ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("no simulated file {}", path.display()))
        })
    }
}

impl Disk for SimDisk {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.directories.iter().any(|directory| directory == path) {
            state.directories.push(path.to_owned());
        }
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.state.lock();
        if state.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = state.io(|state| {
            state.need_space(true)?;
            state.inodes.push(SimInode::default());
            let inode = state.inodes.len() - 1;
            state.change_name(NameChange::Set(path.to_owned(), inode));
            Ok(inode)
        })?;
        Ok(self.handle(&state, inode))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let state = self.state.lock();
        if state.is_off {
            return Err(power_is_off());
        }
        let inode = state.inode_of(path)?;
        Ok(self.handle(&state, inode))
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let state = self.state.lock();
        let children = state.names.keys().filter(|path| path.parent() == Some(directory));
        Ok(children.filter_map(|path| path.file_name()?.to_str().map(str::to_owned)).collect())
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        let state = self.state.lock();
        Ok(state.names.contains_key(path) || state.directories.iter().any(|directory| directory == path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        state.inode_of(from)?;
        state.io(|state| {
            state.change_name(NameChange::Rename(from.to_owned(), to.to_owned()));
            Ok(())
        })
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        let inode = state.inode_of(from)?;
        if state.names.contains_key(to) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.io(|state| {
            state.change_name(NameChange::Set(to.to_owned(), inode));
            Ok(())
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        state.inode_of(path)?;
        state.io(|state| {
            state.change_name(NameChange::Remove(path.to_owned()));
            Ok(())
        })
    }

    fn lock(&self, _path: &Path) -> io::Result<DirectoryLock> {
        // One process: a simulation opens what it means to open.
        Ok(DirectoryLock(None))
    }

    fn sync_dir(&self, directory: &Path) -> io::Result<()> {
        // One journal: the changes of other directories go out with it, in order, up to the last one of this.
        self.state.lock().sync_io(|state| {
            let is_here = |change: &NameChange| match change {
                NameChange::Set(path, _) | NameChange::Remove(path) | NameChange::Rename(_, path) => {
                    path.parent() == Some(directory)
                }
            };
            let count = state.pending_names.iter().rposition(is_here).map_or(0, |last| last + 1);
            for change in state.pending_names.drain(..count) {
                apply_name(&mut state.durable_names, &change);
            }
        })
    }
}

fn apply_name(names: &mut BTreeMap<PathBuf, usize>, change: &NameChange) {
    match change {
        NameChange::Set(path, inode) => {
            names.insert(path.clone(), *inode);
        }
        NameChange::Remove(path) => {
            names.remove(path);
        }
        NameChange::Rename(from, to) => {
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
    }
}

pub(super) fn power_is_off() -> io::Error {
    io::Error::other("the simulated power is off")
}

/// SplitMix64: small, and the same everywhere.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut value = *state;
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
