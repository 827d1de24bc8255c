//! Runs a child process under ptrace, counts its system calls that change files below a folder, and kills it at one of them:
//! the call is not made. So a crash at every I/O is a loop over a number, RocksDB's own I/O included. Or one sync fails.
//!
//! It also follows what is synced: which files and folders have changes that a power cut would take.
//!
//! Not here: what must hold afterwards (the tests).

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A call that changes files, as it is about to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    /// Makes, writes, cuts or extends this file.
    Write(PathBuf),
    /// Makes this name.
    Make(PathBuf),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
    Sync(PathBuf),
}

/// How the child ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// At the call that it was told.
    Killed(Call),
    /// By itself, after so many calls, with this status.
    Done { calls: u64, code: i32 },
}

/// What happens to the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    Nothing,
    /// It is killed at this call, from 1.
    Kill(u64),
    /// This sync of its files, from 1, is not made and fails.
    FailSync(u64),
}

/// Paths whose last change is not synced.
#[derive(Debug, Default)]
pub(crate) struct Dirty(pub(crate) BTreeSet<PathBuf>);

impl Dirty {
    pub(crate) fn follow(&mut self, call: &Call) {
        let parent = |path: &Path| path.parent().expect("a folder").to_owned();
        match call {
            Call::Write(path) => {
                self.0.insert(path.clone());
            }
            // RocksDB's lock, and its WAL that is never written to: nobody misses them.
            Call::Make(path)
                if path.ends_with("LOCK") || path.extension().is_some_and(|extension| extension == "log") => {
            }
            Call::Make(path) => {
                self.0.insert(path.clone());
                self.0.insert(parent(path));
            }
            // That a name comes back after a power cut does no harm here.
            Call::Remove(path) => {
                self.0.remove(path);
            }
            Call::Rename(from, to) => {
                let moved: Vec<PathBuf> =
                    self.0.iter().filter(|path| path.starts_with(from)).cloned().collect();
                for path in moved {
                    self.0.remove(&path);
                    let below = path.strip_prefix(from).expect("below");
                    self.0.insert(if below.as_os_str().is_empty() { to.clone() } else { to.join(below) });
                }
                self.0.insert(parent(from));
                self.0.insert(parent(to));
            }
            Call::Sync(path) => {
                self.0.remove(path);
            }
        }
    }
}

/// Runs `command` and does to it what `at` says, counting calls below `folder`. Every call is shown to `seen` first.
///
/// # Errors
/// When the system lets nobody be traced.
pub(crate) fn run(
    mut command: Command,
    folder: &Path,
    at: At,
    mut seen: impl FnMut(&Call),
) -> io::Result<Ended> {
    // SAFETY: ptrace with TRACEME looks at no arguments and is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    // Reaped below, by number.
    #[allow(clippy::zombie_processes)]
    let child = command.spawn()?;
    let main = libc::pid_t::try_from(child.id()).expect("a pid");
    let (mut count, mut syncs) = (0, 0);
    let mut is_set_up = false;
    loop {
        let mut status = 0;
        // SAFETY: `status` is memory for an int. Only children of this thread are waited for.
        let thread = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            if thread != main {
                continue;
            }
            let code = libc::WEXITSTATUS(status);
            let is_expected = code == 0 || (code == 74 && matches!(at, At::FailSync(_)));
            assert!(libc::WIFEXITED(status) && is_expected, "the child failed: {status:#x}");
            return Ok(Ended::Done { calls: count, code });
        }
        let mut pass_on = 0;
        let signal = libc::WSTOPSIG(status);
        if !is_set_up {
            is_set_up = true;
            let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
            ptrace(libc::PTRACE_SETOPTIONS, thread, 0, options as usize)?;
        } else if signal == libc::SIGTRAP | 0x80 {
            if let Some(call) = entered(thread, folder)? {
                seen(&call);
                count += 1;
                syncs += u64::from(matches!(call, Call::Sync(_)));
                if at == At::FailSync(syncs) && matches!(call, Call::Sync(_)) {
                    skip(thread)?;
                }
                if at == At::Kill(count) {
                    // SAFETY: kill takes no pointers; the child is stopped, so the number is its own.
                    unsafe { libc::kill(main, libc::SIGKILL) };
                    reap(main);
                    return Ok(Ended::Killed(call));
                }
            }
        } else if signal != libc::SIGTRAP && signal != libc::SIGSTOP {
            pass_on = signal as usize;
        }
        // One that was killed meanwhile is waited for above.
        let _ = ptrace(libc::PTRACE_SYSCALL, thread, 0, pass_on);
    }
}

/// The call that a thread is about to make is not made, and fails with ENOSYS.
#[cfg(target_arch = "x86_64")]
fn skip(thread: libc::pid_t) -> io::Result<()> {
    let number = std::mem::offset_of!(libc::user_regs_struct, orig_rax);
    ptrace(libc::PTRACE_POKEUSER, thread, number, usize::MAX)
}

#[cfg(not(target_arch = "x86_64"))]
fn skip(_: libc::pid_t) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn reap(main: libc::pid_t) {
    loop {
        let mut status = 0;
        // SAFETY: `status` is memory for an int.
        let thread = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 || (thread == main && libc::WIFSIGNALED(status)) {
            return;
        }
    }
}

fn ptrace(request: libc::c_uint, thread: libc::pid_t, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests used here take `data` by value, or as memory that their caller keeps.
    match unsafe { libc::ptrace(request, thread, address as *mut c_void, data as *mut c_void) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The call that a thread is about to make, if it changes something below the folder.
fn entered(thread: libc::pid_t, folder: &Path) -> io::Result<Option<Call>> {
    // SAFETY: a structure of numbers may be all zeros.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::ptrace_syscall_info>();
    ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size, std::ptr::from_mut(&mut info) as usize)?;
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(None);
    }
    // SAFETY: `op` says that this is the variant.
    let entry = unsafe { info.u.entry };
    let args = entry.args;
    let by_fd = |at: usize| std::fs::read_link(format!("/proc/{thread}/fd/{}", args[at] as i32)).ok();
    let by_name = |at: usize| text(thread, args[at]).map(PathBuf::from);
    let by_both = |fd: usize, at: usize| {
        let name = by_name(at)?;
        if name.is_absolute() { Some(name) } else { Some(by_fd(fd)?.join(name)) }
    };
    let creates = |flags: u64| flags & (libc::O_CREAT | libc::O_TRUNC) as u64 != 0;
    let call = match entry.nr as libc::c_long {
        libc::SYS_write
        | libc::SYS_pwrite64
        | libc::SYS_writev
        | libc::SYS_pwritev
        | libc::SYS_ftruncate
        | libc::SYS_fallocate => by_fd(0).map(Call::Write),
        libc::SYS_fsync | libc::SYS_fdatasync => by_fd(0).map(Call::Sync),
        libc::SYS_openat if creates(args[2]) => by_both(0, 1).map(Call::Make),
        libc::SYS_unlinkat => by_both(0, 1).map(Call::Remove),
        libc::SYS_renameat | libc::SYS_renameat2 => {
            by_both(0, 1).zip(by_both(2, 3)).map(|(from, to)| Call::Rename(from, to))
        }
        libc::SYS_linkat => by_both(2, 3).map(Call::Make),
        libc::SYS_mkdirat => by_both(0, 1).map(Call::Make),
        other => old_calls(other, creates(args[1]), by_name),
    };
    Ok(call.filter(|call| is_below(call, folder)))
}

/// Calls that newer architectures do not have.
#[cfg(target_arch = "x86_64")]
fn old_calls(
    number: libc::c_long,
    creates: bool,
    by_name: impl Fn(usize) -> Option<PathBuf>,
) -> Option<Call> {
    match number {
        libc::SYS_open if creates => by_name(0).map(Call::Make),
        libc::SYS_creat | libc::SYS_mkdir => by_name(0).map(Call::Make),
        libc::SYS_unlink | libc::SYS_rmdir => by_name(0).map(Call::Remove),
        libc::SYS_rename => by_name(0).zip(by_name(1)).map(|(from, to)| Call::Rename(from, to)),
        libc::SYS_link => by_name(1).map(Call::Make),
        libc::SYS_truncate => by_name(0).map(Call::Write),
        _ => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn old_calls(_: libc::c_long, _: bool, _: impl Fn(usize) -> Option<PathBuf>) -> Option<Call> {
    None
}

fn is_below(call: &Call, folder: &Path) -> bool {
    let (Call::Write(path)
    | Call::Make(path)
    | Call::Remove(path)
    | Call::Rename(_, path)
    | Call::Sync(path)) = call;
    // RocksDB's own log of what it does: nothing depends on it.
    let is_chatter = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("LOG"));
    path.starts_with(folder) && !is_chatter
}

/// A string in a stopped thread's memory.
fn text(thread: libc::pid_t, address: u64) -> Option<String> {
    let memory = std::fs::File::open(format!("/proc/{thread}/mem")).ok()?;
    let mut bytes = Vec::new();
    let mut byte = [0];
    while bytes.len() < 4096 {
        memory.read_exact_at(&mut byte, address + bytes.len() as u64).ok()?;
        if byte[0] == 0 {
            return String::from_utf8(bytes).ok();
        }
        bytes.push(byte[0]);
    }
    None
}
