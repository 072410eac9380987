//! The fake server of object stores keeps the rules of the real ones.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

/// A running server.
struct Server {
    child: Child,
    address: String,
}

/// An answer: its status, its head and its body.
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn header(&self, name: &str) -> String {
        let line = self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.unwrap_or_default().to_owned()
    }
}

impl Server {
    fn start(dialect: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fake_store"));
        command.args(["--dialect", dialect]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening ").unwrap().to_owned();
        Self { child, address }
    }

    fn connect(&self) -> BufReader<TcpStream> {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        BufReader::with_capacity(1 << 10, stream)
    }

    fn send(&self, line: &str, headers: &str, body: &[u8]) -> Answer {
        exchange(&mut self.connect(), line, headers, body)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success(), "the server ends with its standard input");
    }
}

/// Sends a request with credentials and reads the answer.
fn exchange(connection: &mut BufReader<TcpStream>, line: &str, headers: &str, body: &[u8]) -> Answer {
    let len = body.len();
    let head = format!("{line} HTTP/1.1\r\nAuthorization: someone\r\nContent-Length: {len}\r\n{headers}\r\n");
    connection.get_mut().write_all(head.as_bytes()).unwrap();
    connection.get_mut().write_all(body).unwrap();
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(connection.read_line(&mut head).unwrap() > 0, "no answer to {line}");
    }
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut answer = Answer { status, head, body: Vec::new() };
    let wanted = if line.starts_with("HEAD") { 0 } else { answer.header("Content-Length").parse().unwrap() };
    answer.body.reserve_exact(wanted);
    connection.take(wanted as u64).read_to_end(&mut answer.body).unwrap();
    answer
}

#[test]
fn exactly_one_of_racing_creates_wins() {
    for (dialect, condition, taken) in [
        ("s3", "If-None-Match: *\r\n", 412),
        ("gcs", "x-goog-if-generation-match: 0\r\n", 412),
        ("azure", "x-ms-blob-type: BlockBlob\r\nIf-None-Match: *\r\n", 409),
    ] {
        let server = Arc::new(Server::start(dialect));
        let racers: Vec<_> = (0..16)
            .map(|racer: u8| {
                let server = Arc::clone(&server);
                std::thread::spawn(move || server.send("PUT /bucket/key", condition, &[racer; 9]).status)
            })
            .collect();
        let mut found: Vec<u16> = racers.into_iter().map(|racer| racer.join().unwrap()).collect();
        found.sort_unstable();
        assert!(found[0] < 300, "{dialect}: {found:?}");
        assert!(found[1..].iter().all(|status| *status == taken), "{dialect}: {found:?}");
    }
}

#[test]
fn uploads_keep_the_rules_of_s3() {
    let server = Server::start("s3");
    let started = server.send("POST /bucket/key?uploads", "", b"").text();
    let id = started.split("UploadId>").nth(1).unwrap().trim_end_matches("</").to_owned();
    let part = |number: u32, body: &[u8]| {
        server.send(&format!("PUT /bucket/key?partNumber={number}&uploadId={id}"), "", body).header("ETag")
    };
    let complete = |tags: &[&String]| {
        let mut body = "<CompleteMultipartUpload>".to_owned();
        for (place, tag) in tags.iter().enumerate() {
            let number = place + 1;
            write!(body, "<Part><ETag>{tag}</ETag><PartNumber>{number}</PartNumber></Part>").unwrap();
        }
        let answer = server.send(&format!("POST /bucket/key?uploadId={id}"), "", body.as_bytes());
        (answer.status, answer.text())
    };
    let (small, last) = (part(1, b"small"), part(2, b"last"));
    assert!(complete(&[&small, &last]).1.contains("EntityTooSmall"));
    let first = part(1, &vec![1; 5 << 20]);
    assert!(complete(&[&small, &last]).1.contains("InvalidPart"), "the first part was replaced");
    assert!(complete(&[&first, &last, &last]).1.contains("InvalidPart"), "there is no third part");
    assert_eq!(server.send("HEAD /bucket/key", "", b"").status, 404);
    assert_eq!(complete(&[&first, &last]).0, 200);
    assert_eq!(complete(&[&first, &last]).0, 404, "an upload is completed once");
    let range = server.send("GET /bucket/key", "Range: bytes=5242879-5242881\r\n", b"");
    assert_eq!((range.status, range.body.as_slice()), (206, b"\x01la".as_slice()));
    assert_eq!(range.header("Content-Range"), "bytes 5242879-5242881/5242884");
}

#[test]
fn wrong_checksums_are_refused() {
    let server = Server::start("s3");
    // The CRC64NVME of `123456789` is ae8b14860a799888.
    let header = |text: &str| format!("x-amz-checksum-crc64nvme: {text}\r\n");
    let answer = server.send("PUT /bucket/key", &header("rosUhgp5mIg="), b"123456789");
    assert_eq!((answer.status, answer.header("x-amz-checksum-crc64nvme").as_str()), (200, "rosUhgp5mIg="));
    let answer = server.send("PUT /bucket/other", &header("rosUhgp5mIg="), b"123456780");
    assert!(answer.status == 400 && answer.text().contains("BadDigest"), "{}", answer.text());
    assert_eq!(server.send("HEAD /bucket/other", "", b"").status, 404);
}

#[test]
fn bad_requests_are_answered() {
    for dialect in ["s3", "gcs", "azure"] {
        let server = Server::start(dialect);
        for line in
            ["GET /%ff/key", "POST /bucket?delete", "PUT /bucket/key?partNumber=x&uploadId=1", "BREW /b/k"]
        {
            let status = server.send(line, "", b"<Delete></Delete>").status;
            assert!(status == 400 || status == 501, "{dialect}: {line}: {status}");
        }
        let mut connection = server.connect();
        connection.get_mut().write_all(b"\x16\x03\x01 not HTTP\r\n\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 400"), "{dialect}: {answer}");
        for path in ["faults", "redirect", "nothing"] {
            assert_eq!(server.send(&format!("POST /_control/{path}"), "", b"[]").status, 400, "{path}");
        }
    }
}

#[test]
fn expired_tokens_are_refused() {
    for (dialect, status) in [("s3", 400), ("gcs", 401), ("azure", 401)] {
        let server = Server::start(dialect);
        assert_eq!(server.send("GET /bucket/key", "", b"").status, 404);
        server.send("POST /_control/expire", "", br#"{"token": "someone"}"#);
        assert_eq!(server.send("GET /bucket/key", "", b"").status, status, "{dialect}");
    }
}

#[test]
#[ignore = "it measures"]
fn loopback_rates() {
    let server = Server::start("s3");
    let (mut connection, body) = (server.connect(), vec![7; 8 << 20]);
    let rounds = 100;
    let mut rate = |line: &str, headers: &str, body: &[u8]| {
        let begin = Instant::now();
        for _ in 0..rounds {
            let answer = exchange(&mut connection, line, headers, body);
            assert!(answer.status < 300, "{}", answer.text());
        }
        f64::from(rounds * (8 << 20)) / begin.elapsed().as_secs_f64() / 1e9
    };
    let put = rate("PUT /bucket/key", "", &body);
    let get = rate("GET /bucket/key", "Range: bytes=0-8388607\r\n", b"");
    println!("PUT {put:.2} GB/s, GET {get:.2} GB/s, in bodies of 8 MiB");
}
