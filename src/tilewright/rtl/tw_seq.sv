// tw_seq: the sequencer: dispatch, hardware loops, R registers.
//
// Implements "Sequencer and fetch" of docs/concepts/microarchitecture.md (fetch in tw_fetch, queues
// in tw_queue): one instruction a cycle, either appended to its engine's queue or, of the
// sequencer's own, executed. `code_length` must be stable from the cycle before `run` on.

module tw_seq import tw_pkg::*; (
    input  logic         clk,
    input  logic         rst,
    input  logic [7:0]   fault,
    input  logic         run,
    input  logic         config_write,  // R registers, while `run` is low
    input  logic [4:0]   config_register,
    input  logic [39:0]  config_value,
    input  logic [31:0]  code_length,
    output logic         finished,
    output logic         trapped,
    output logic         stopped,       // finished or trapped before this cycle
    output logic         dispatch_valid,
    output logic [2:0]   dispatch_engine,
    output logic         fetch_counting,
    // DDR
    output ddr_request_t fetch_request,
    input  logic         fetch_granted,
    input  logic [GB-1:0] fetch_data,
    // Semaphores
    input  logic [31:0]  semaphore_zero,
    output logic         takes,         // the sequencer itself: takes and gives in this cycle
    output logic [31:0]  take_mask,
    output logic [31:0]  give_mask,
    // Queues
    input  logic [5:0]   idle,
    input  logic [5:0]   queue_valid,
    input  logic [5:0]   queue_full,
    output logic [5:0]   push,
    output logic [511:0] push_word      // with its addresses; zero without push
);
  wire f_loop_count = FAULTS_BUILT && fault == FAULT_LOOP_COUNT;
  wire f_register_carry = FAULTS_BUILT && fault == FAULT_REGISTER_CARRY;

  localparam int unsigned LOOPS = 4;
  localparam logic [2:0] SEQUENCER = 3'd6;

  logic finished_q;
  logic trapped_q;
  logic [31:0] pc_q;
  logic checked_q;  // the instruction at pc was found legal in an earlier cycle
  logic [39:0] r_q[R_REGISTERS];
  logic [31:0] code_length_q;

  // Open loops.
  logic [31:0] body_q[LOOPS];  // first instruction of the body
  logic [15:0] left_q[LOOPS];  // iterations after the current one
  logic [2:0] depth_q;

  // The instruction at pc.
  logic ready;
  logic [511:0] word;
  wire [7:0] opcode = word[7:0];
  wire [1:0] innermost = 2'(depth_q - 1'b1);

  logic legal;
  logic [2:0] engine;
  logic acts;     // an instruction of the sequencer executes
  logic appends;  // an instruction goes to its engine's queue
  logic traps;
  logic jump;

  wire runs_out = run && !stopped && pc_q == code_length_q;  // the code ended without `halt`
  wire quiet = &idle && queue_valid == '0;

  always_comb begin
    legal = 1'b0;
    engine = SEQUENCER;
    acts = 1'b0;
    appends = 1'b0;
    traps = 1'b0;
    jump = 1'b0;
    if (ready) begin
      if (checked_q) legal = 1'b1;
      else legal = is_legal(word);
      engine = engine_of(word);
      traps = !legal || (opcode == OP_LOOP && depth_q == 3'(LOOPS))
          || (opcode == OP_END_LOOP && depth_q == '0);
      if (!traps) begin
        if (engine == SEQUENCER)
          acts = (word[39:8] & semaphore_zero) == '0
              && ((opcode != OP_FENCE && opcode != OP_HALT) || quiet);
        else appends = !queue_full[engine];
        jump = acts && opcode == OP_END_LOOP && left_q[innermost] != '0;
      end
    end
  end

  assign dispatch_valid = acts || appends;
  assign dispatch_engine = engine;
  assign takes = acts;
  assign take_mask = word[39:8];
  assign give_mask = word[71:40];
  assign stopped = finished_q || trapped_q;
  assign finished = finished_q || (acts && opcode == OP_HALT);
  assign trapped = trapped_q || traps || runs_out;

  tw_fetch fetch (
      .clk, .rst, .run, .stopped, .code_length(code_length_q),
      .pc(pc_q), .jump, .target(body_q[innermost]), .ready, .word,
      .counting(fetch_counting), .request(fetch_request), .granted(fetch_granted),
      .data(fetch_data)
  );

  always_ff @(posedge clk) code_length_q <= code_length;

  always_ff @(posedge clk) begin
    if (rst) begin
      finished_q <= 1'b0;
      trapped_q <= 1'b0;
      pc_q <= '0;
      checked_q <= 1'b0;
      depth_q <= '0;
    end else begin
      finished_q <= finished;
      trapped_q <= trapped;
      checked_q <= legal && !dispatch_valid;
      if (jump) pc_q <= body_q[innermost];
      else if (dispatch_valid && opcode != OP_HALT) pc_q <= pc_q + 1'b1;
      if (acts && opcode == OP_LOOP) depth_q <= depth_q + 1'b1;
      if (acts && opcode == OP_END_LOOP && !jump) depth_q <= depth_q - 1'b1;
    end
  end

  wire [15:0] count = word[87:72];  // of a `loop`: iterations - 1
  always_ff @(posedge clk) begin
    if (acts && opcode == OP_LOOP) begin
      body_q[depth_q[1:0]] <= pc_q + 1'b1;
      left_q[depth_q[1:0]] <= f_loop_count && count > 16'd1 ? count - 1'b1 : count;
    end
    if (jump) left_q[innermost] <= left_q[innermost] - 1'b1;
  end

  // R registers: R0 is never written.
  wire [R_BITS-1:0] rd = R_BITS'(word[76:72]);
  always_ff @(posedge clk) begin
    if (rst) for (int unsigned i = 0; i < R_REGISTERS; i++) r_q[i] <= '0;
    else if (config_write && !run) begin
      if (config_register != '0 && 32'(config_register) < R_REGISTERS)
        r_q[R_BITS'(config_register)] <= config_value;
    end else if (acts && opcode == OP_SET_REG) r_q[rd] <= word[116:77];
    else if (acts && opcode == OP_ADD_REG)
      r_q[rd] <= plus_register(r_q[rd], word[116:77], f_register_carry);
  end

  function automatic logic [R_REGISTERS-1:0][39:0] registers();
    for (int unsigned i = 0; i < R_REGISTERS; i++) registers[i] = r_q[i];
  endfunction

  always_comb begin
    push = '0;
    push_word = '0;
    if (appends) begin
      for (int unsigned e = 0; e < 6; e++) push[e] = engine == 3'(e);
      push_word = with_registers(word, registers(), f_register_carry);
    end
  end
endmodule
