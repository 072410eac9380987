//! A fake server of object stores, for tests and benchmarks.
//!
//! `fake_store --dialect s3|gcs|azure [--port N]` prints `listening 127.0.0.1:PORT`. It serves
//! until its standard input ends, so that it never outlives its test.
//!
//! Objects are in memory. Every bucket exists, except those with the name `nothing`. Signatures are
//! not checked, but a request needs credentials unless the name of its bucket begins with `public`.
//! The server knows the requests that the crate `object_store` makes, and no others.
//!
//! Paths below `/_control/` count requests and make faults: see [`control`].

mod azure;
mod call;
mod control;
mod encoding;
mod http;
mod objects;
mod s3;
mod server;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Arc;

use self::server::{Dialect, Server};

const USAGE: &str = "usage: fake_store --dialect s3|gcs|azure [--port N]";

/// The dialect and the port that the arguments name.
fn parsed(mut arguments: impl Iterator<Item = String>) -> Option<(Dialect, u16)> {
    let (mut dialect, mut port) = (None, 0);
    while let Some(argument) = arguments.next() {
        let value = arguments.next()?;
        match (argument.as_str(), value.as_str()) {
            ("--dialect", "s3") => dialect = Some(Dialect::S3),
            ("--dialect", "gcs") => dialect = Some(Dialect::Google),
            ("--dialect", "azure") => dialect = Some(Dialect::Azure),
            ("--port", number) => port = number.parse().ok()?,
            _ => return None,
        }
    }
    Some((dialect?, port))
}

/// Serves until standard input ends.
fn serve(dialect: Dialect, port: u16) -> std::io::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    let mut out = std::io::stdout();
    writeln!(out, "listening {}", listener.local_addr()?)?;
    out.flush()?;
    let server = Arc::new(Server::new(dialect));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let server = Arc::clone(&server);
            std::thread::spawn(move || server.serve(&stream));
        }
    });
    let mut ignored = [0; 64];
    while std::io::stdin().read(&mut ignored)? > 0 {}
    Ok(())
}

fn main() -> ExitCode {
    let Some((dialect, port)) = parsed(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    match serve(dialect, port) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fake_store: {error}");
            ExitCode::FAILURE
        }
    }
}
