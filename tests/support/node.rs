//! One server process of a test's cluster.

use std::fs::OpenOptions;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// What a node is started with, each time.
#[derive(Debug, Clone)]
pub(crate) struct NodeSettings {
    pub(crate) id: u64,
    pub(crate) grpc_port: u16,
    pub(crate) http_port: u16,
    /// Where others reach it: itself, or its proxy.
    pub(crate) advertised: String,
    pub(crate) peers: String,
    pub(crate) server_args: Vec<String>,
}

/// A node: dead or alive, it keeps its directory.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) settings: NodeSettings,
    dir: PathBuf,
    child: Option<Child>,
}

impl Node {
    pub(crate) fn new(settings: NodeSettings, dir: &Path) -> Self {
        let dir = dir.join(format!("node-{}", settings.id));
        std::fs::create_dir_all(&dir).unwrap();
        Node { settings, dir, child: None }
    }

    /// Its own address, past any proxy.
    pub(crate) fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.settings.grpc_port)
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    pub(crate) fn is_running(&self) -> bool {
        self.child.is_some()
    }

    pub(crate) fn pid(&self) -> i32 {
        let child = self.child.as_ref().unwrap_or_else(|| panic!("node {} does not run", self.settings.id));
        i32::try_from(child.id()).unwrap()
    }

    /// What it has in memory: its resident set.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("of a living process");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        kib * 1024
    }

    /// Starts it; `failpoints` is what `EVERSHARD_FAILPOINTS` takes.
    pub(crate) fn start(&mut self, failpoints: Option<&str>) {
        assert!(self.child.is_none(), "node {} runs already", self.settings.id);
        self.child = Some(self.command(failpoints).spawn().unwrap());
    }

    pub(crate) fn command(&self, failpoints: Option<&str>) -> Command {
        let settings = &self.settings;
        let log = OpenOptions::new().create(true).append(true).open(self.log()).unwrap();
        let mut command = server();
        command
            .args(["--node-id", &settings.id.to_string()])
            .args(["--listen", &format!("127.0.0.1:{}", settings.grpc_port)])
            .args(["--http", &format!("127.0.0.1:{}", settings.http_port)])
            .args(["--advertise", &settings.advertised])
            .args(["--peers", &settings.peers])
            .arg("--data")
            .arg(self.data())
            .args(&settings.server_args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        if let Some(failpoints) = failpoints {
            command.env("EVERSHARD_FAILPOINTS", failpoints);
        }
        command
    }

    /// Its log's segments, oldest first.
    pub(crate) fn log_segments(&self) -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = std::fs::read_dir(self.data().join("log"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
            .collect();
        found.sort();
        found
    }

    /// What its HTTP side answers, head and all; empty when nobody does.
    pub(crate) async fn http(&self, path: &str) -> String {
        let ask = async {
            let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", self.settings.http_port)).await?;
            let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            std::io::Result::Ok(answer)
        };
        tokio::time::timeout(Duration::from_secs(5), ask)
            .await
            .map(Result::unwrap_or_default)
            .unwrap_or_default()
    }

    /// SIGKILL: nothing is flushed, nobody is told.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// SIGTERM, and waits for the end.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        self.signal(libc::SIGTERM);
        self.wait_end()
    }

    /// Waits until it ends by itself.
    pub(crate) fn wait_end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + super::PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.poll_end() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("node {} did not end; its log:\n{}", self.settings.id, self.log_tail());
    }

    /// Its exit status, once, when it has ended by itself.
    pub(crate) fn poll_end(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut()?.try_wait().unwrap()?;
        self.child = None;
        Some(status)
    }

    /// Whether it has ended by itself; [`Node::poll_end`] still tells how.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some())
    }

    /// Freezes it: connections stay open, nothing answers.
    pub(crate) fn freeze(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// Lets it go on.
    pub(crate) fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill(2) takes no pointers; the child was not reaped yet, so the number is its own.
        let sent = unsafe { libc::kill(self.pid(), signal) };
        assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
    }

    /// The end of its log, for the message of a failing test.
    pub(crate) fn log_tail(&self) -> String {
        let text = std::fs::read(self.log())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    pub(crate) fn log_contains(&self, text: &str) -> bool {
        std::fs::read(self.log()).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(text))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // The test is over, whatever became of the process.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `evershard server`, dying with the test that starts it.
pub(crate) fn server() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evershard"));
    command.arg("server").env_remove("EVERSHARD_ENDPOINTS").process_group(0);
    // SAFETY: prctl takes a signal number by value and is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

/// True when the process ended by SIGKILL, as a failpoint ends it.
pub(crate) fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(libc::SIGKILL)
}
